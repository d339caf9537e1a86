"""Logits of two columns in place of a vocabulary: the same log-probabilities of the labels, and the same gradients."""

from __future__ import annotations

import pytest
import torch

from fcp_cli.integrations.hugging_face.pairs import two_way

pytestmark = pytest.mark.torch


def test_two_columns_have_the_log_probabilities_of_the_labels_and_their_gradients() -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(3, 7, 50, dtype=torch.float64)).requires_grad_()
    labels, upstream = torch.randint(50, (3, 7)), torch.randn(3, 7, dtype=torch.float64)
    learned = torch.rand(3, 7) < 0.7
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    [wanted] = torch.autograd.grad(((expected * upstream)[learned]).sum(), logits, retain_graph=True)
    found = two_way(expected * learned, learned).log_softmax(-1)[..., 0]
    [given] = torch.autograd.grad(((found * upstream)[learned]).sum(), logits)
    torch.testing.assert_close(found[learned], expected[learned], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(given, wanted, rtol=1e-7, atol=1e-9)


def test_a_certain_token_has_finite_logits() -> None:
    log_probs = torch.zeros(1, 1, requires_grad=True)
    found = two_way(log_probs, torch.ones(1, 1, dtype=torch.bool)).log_softmax(-1)[..., 0]
    [gradient] = torch.autograd.grad(found.sum(), log_probs)
    assert abs(float(found.detach())) < 1e-6 and torch.isfinite(gradient).all()
