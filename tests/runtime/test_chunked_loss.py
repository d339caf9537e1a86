"""The loss of hidden states and a head against the loss of whole logits; sessions are in test_session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fcp_cli.errors import RunError
from fcp_cli.runtime import loss
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loss import (
    Labels,
    block_columns,
    chunked_token_loss_sum,
    head_loss_sum,
    labelled_rows,
    token_loss_sum,
)

pytestmark = pytest.mark.torch

TOKENS, WIDTH, VOCABULARY = 37, 24, 1031


def example(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    return torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True), head


def labels(share: float) -> Labels:
    torch.manual_seed(1)
    values = torch.randint(VOCABULARY, (1, TOKENS))
    values[0, round(share * TOKENS) :] = IGNORED
    return Labels(values=values, rows=labelled_rows(values))


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss * 0.3, leaves))


def require_as_of_whole_logits(hidden: Tensor, head: nn.Linear, given: Labels) -> None:
    """Compare the loss and the gradients of hidden states and head."""
    leaves = (hidden, *(weight for weight in head.parameters() if weight.isfinite().all()))
    each = nn.functional.cross_entropy(head(hidden)[0], given.values[0], ignore_index=IGNORED, reduction="none")
    plain = each.sum() if given.weights is None else (each * given.weights[0]).sum()
    chunked = head_loss_sum(hidden, head, given)
    assert abs(float(chunked.detach() - plain.detach())) <= 1e-12 * max(1.0, float(plain.detach()))
    for found, wanted in zip(gradients(chunked, *leaves), gradients(plain, *leaves), strict=True):
        assert float((found - wanted).abs().max()) <= 1e-12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("columns", [1, 100, 256, 512, 2000])
def test_loss_and_gradients_are_those_of_whole_logits(
    columns: int, share: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * columns * TOKENS)
    require_as_of_whole_logits(*example(bias=bias), labels(share))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_weighted_losses_are_those_of_whole_logits(share: float) -> None:
    weights = torch.rand(1, TOKENS, dtype=torch.float64)
    require_as_of_whole_logits(*example(bias=True), replace(labels(share), weights=weights))


def test_extreme_logits_neither_overflow_nor_vanish() -> None:
    hidden, head = example(torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    plain = token_loss_sum(head(hidden), labels(1.0).values)
    assert float(head_loss_sum(hidden, head, labels(1.0)).detach()) == pytest.approx(float(plain.detach()), rel=1e-6)


def test_entries_that_a_bias_rules_out_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = example(bias=True)
    known = labels(1.0)
    with torch.no_grad():
        head.bias.masked_fill_(torch.ones(VOCABULARY).index_fill(0, known.values[0], 0.0).bool(), -torch.inf)
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * TOKENS)  # in most blocks of one column nothing is left
    require_as_of_whole_logits(hidden, head, known)


def test_the_host_never_waits_for_a_value() -> None:
    """Of fake tensors there is none: asking for one would raise."""
    with FakeTensorMode():
        hidden = torch.empty(1, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(151_936, 64, dtype=torch.bfloat16, requires_grad=True)
        values = torch.empty(1, 4096, dtype=torch.int64)
        rows = torch.empty(1000, dtype=torch.int64)
        torch.autograd.backward(head_loss_sum(hidden, weight, Labels(values=values, rows=rows)))
        assert hidden.grad is not None
        assert weight.grad is not None


@pytest.mark.parametrize("leaf", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient(leaf: str) -> None:
    hidden, head = example()
    frozen, trained = (hidden, head.weight) if leaf == "hidden" else (head.weight, hidden)
    frozen.requires_grad_(False)
    torch.autograd.backward(head_loss_sum(hidden, head, labels(1.0)))
    assert frozen.grad is None
    assert trained.grad is not None


def test_a_weight_alone_will_do_as_head() -> None:
    hidden, head = example()
    assert torch.equal(head_loss_sum(hidden, head.weight, labels(1.0)), head_loss_sum(hidden, head, labels(1.0)))


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_in_bf16_the_error_is_at_most_that_of_whole_logits(how: str) -> None:
    def error_of(loss: Any) -> list[float]:
        hidden, head = example(torch.float32)
        exact = gradients(token_loss_sum(head(hidden), labels(1.0).values), hidden, head.weight)
        if how == "weights":
            hidden, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found = loss(hidden, head)
        assert found.dtype == torch.float32
        grads = gradients(found, hidden, head.weight)
        assert [grad.dtype for grad in grads] == [hidden.dtype, head.weight.dtype]
        return [float((a - b).norm() / b.norm()) for a, b in zip(grads, exact, strict=True)]

    plain = error_of(lambda hidden, head: token_loss_sum(head(hidden), labels(1.0).values))
    chunked = error_of(lambda hidden, head: head_loss_sum(hidden, head, labels(1.0)))
    assert all(found <= 1.05 * allowed for found, allowed in zip(chunked, plain, strict=True))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements that one new tensor has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_more_than_a_block_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary = 64, 8192
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * tokens * 512)
    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    with Largest() as largest:
        torch.autograd.backward(chunked_token_loss_sum(hidden, weight, None, torch.zeros(tokens, dtype=torch.int64)))
    assert largest.numel == tokens * 512


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "columns"),
    [(16_384, 151_936, 4096), (441, 151_936, 151_936), (1 << 20, 151_936, 64), (0, 9, 9), (1 << 40, 9, 1)],
)
def test_blocks_fill_what_they_may_take(tokens: int, vocabulary: int, columns: int) -> None:
    assert block_columns(tokens, vocabulary) == columns


def test_only_rows_with_labels_are_multiplied_where_many_have_none() -> None:
    assert labels(1.0).rows is None
    assert labels(0.95).rows is None
    rows = labels(0.5).rows
    assert rows is not None
    assert rows.tolist() == list(range(18))


class Sharded:
    """What a head's weight is outside the forward of a model that `fully_shard` wraps."""

    device_mesh = "somewhere"


def test_a_head_that_is_sharded_is_refused_with_the_way_out() -> None:
    hidden, head = example()
    del head.weight
    head.weight = Sharded()  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"head's weight is sharded .*; .* pass labels=microbatch.labels to the model"):
        head_loss_sum(hidden, head, labels(1.0))


class FakeLiger:
    """Stands in for liger_kernel's class of the same name: takes the same arguments and computes the same sum."""

    calls = 0
    fails = False

    def __init__(self, *, ignore_index: int, reduction: str, accum_dtype: torch.dtype) -> None:
        assert (ignore_index, reduction, accum_dtype) == (IGNORED, "sum", torch.float32)

    def __call__(self, weight: Tensor, hidden: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        type(self).calls += 1
        if self.fails:
            raise RuntimeError("no kernel for this device\nand more lines")
        return nn.functional.cross_entropy(
            nn.functional.linear(hidden, weight, bias), target, ignore_index=IGNORED, reduction="sum"
        )


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLiger]]:
    """An installed liger_kernel, a device that counts as an accelerator, and nothing remembered of earlier tests."""
    module: Any = ModuleType("liger_kernel.transformers.fused_linear_cross_entropy")
    module.LigerFusedLinearCrossEntropyLoss = FakeLiger
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(loss, "_HOSTS", frozenset())
    monkeypatch.setattr(FakeLiger, "calls", 0)
    loss._installed.cache_clear()
    yield FakeLiger
    loss._installed.cache_clear()


def test_an_installed_kernel_computes_the_loss_on_an_accelerator(liger: type[FakeLiger]) -> None:
    hidden, head = example(torch.bfloat16)
    found = head_loss_sum(hidden, head, labels(1.0))
    assert liger.calls == 1
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(
        float(token_loss_sum(head(hidden), labels(1.0).values).detach()), rel=1e-2
    )


def test_a_kernel_that_fails_is_named_once_and_left_out(
    liger: type[FakeLiger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "fails", True)
    hidden, head = example(torch.bfloat16)
    with pytest.warns(
        UserWarning, match="^the loss is computed without liger_kernel, which failed: no kernel for this device$"
    ):
        found = head_loss_sum(hidden, head, labels(1.0))
    assert torch.equal(found, head_loss_sum(hidden, head, labels(1.0)))
    assert liger.calls == 1


@pytest.mark.parametrize("case", ["fp32", "no labels"])
def test_kernels_are_not_asked_for_what_they_cannot_do(case: str, liger: type[FakeLiger]) -> None:
    hidden, head = example(torch.float32 if case == "fp32" else torch.bfloat16)
    head_loss_sum(hidden, head, labels(0.0 if case == "no labels" else 1.0))
    assert liger.calls == 0
