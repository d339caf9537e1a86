from __future__ import annotations

import pytest
import torch

from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loss import next_token_labels, token_loss_sum

pytestmark = pytest.mark.torch


def test_labels_are_the_next_tokens_and_the_last_has_none() -> None:
    assert next_token_labels(torch.tensor([5, 6, 7])).tolist() == [6, 7, IGNORED]
    assert next_token_labels(torch.tensor([5])).tolist() == [IGNORED]


def test_the_sum_leaves_ignored_tokens_out() -> None:
    logits = torch.randn(1, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[2, IGNORED, 4]])
    wanted = -logits[0].log_softmax(-1)[[0, 2], [2, 4]].sum()
    assert token_loss_sum(logits, labels).item() == pytest.approx(wanted.item(), abs=1e-14)


def test_where_all_are_ignored_loss_and_gradients_are_zero_and_not_nan() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 2), IGNORED))
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("given", "summed_in"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_are_taken_in_fp32_at_least(given: torch.dtype, summed_in: torch.dtype) -> None:
    assert token_loss_sum(torch.zeros(1, 1, 3, dtype=given), torch.tensor([[1]])).dtype == summed_in
