"""What recomputed layers keep and what they compute again; sessions and wrapped models are in test_session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.recompute import keep_attention, keep_products
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from tests.runtime.sharded_layers import WIDTH, Passes, train_layers

pytestmark = pytest.mark.torch

LENGTHS = (5, 1, 30)
HEADS = 3
Run: TypeAlias = Callable[["Layer", Tensor, Ring], Tensor]


class Layer(nn.Module):
    """A layer that attends twice, with work before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, size) for size in (3 * WIDTH, 3 * WIDTH, WIDTH))
        self.double()

    def forward(self, hidden: Tensor, ring: Ring) -> Tensor:
        for project in (self.first, self.second):
            q, k, v = project(hidden).tanh().unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
            hidden = hidden + attention(q, k, v, ring=ring).transpose(1, 2).flatten(2)
        out: Tensor = self.last(hidden).tanh()
        return out


def whole(layer: Layer, hidden: Tensor, ring: Ring) -> Tensor:
    out: Tensor = layer(hidden, ring)
    return out


full: Run = partial(checkpoint, use_reentrant=False)
selective: Run = partial(checkpoint, use_reentrant=False, context_fn=keep_attention)
elementwise: Run = partial(checkpoint, use_reentrant=False, context_fn=keep_products)


def train(run: Run, *, degree: int, at_once: int = 1) -> list[Passes]:
    """Two layers over some packs."""
    built = [[Layer(), Layer()] for _ in range(degree)]  # from one seed, which threads would share
    return train_layers(built, [LENGTHS] * at_once, lambda rank: lambda index, *given: run(*given))


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("run", [elementwise, selective, full], ids=["elementwise", "selective", "full"])
def test_recomputed_layers_have_the_gradients_of_whole_ones(run: Run, degree: int, at_once: int) -> None:
    for found, expected in zip(
        train(run, degree=degree, at_once=at_once), train(whole, degree=degree, at_once=at_once), strict=True
    ):
        assert len(found.grads) == len(expected.grads) == 12
        assert all(map(torch.equal, found.grads, expected.grads))


def test_nothing_travels_again_where_attention_is_kept() -> None:
    """Degree 3, two layers of two attention calls: 2 hops of keys forward; backward 2 of keys and 2 of gradients."""
    kinds = ("kv", "kv+dkv", "dkv")
    sent = {run: train(run, degree=3)[0].sent for run in (whole, elementwise, selective, full)}
    assert sent[elementwise] == sent[selective] == sent[whole]
    assert [sent[whole].count(kind) for kind in kinds] == [4 * (2 + 1), 4, 4]
    assert [sent[full].count(kind) for kind in kinds] == [4 * (2 + 2 + 1), 4, 4]


def test_kept_attention_counts_as_one_call() -> None:
    counts = {
        run: [(r.attention_calls, r.context.backward_calls) for r in train(run, degree=1)[0].rings]
        for run in (whole, full)
    }
    assert counts == {whole: [(4, 4)], full: [(8, 4)]}
    assert [(r.attention_calls, r.context.backward_calls) for r in train(selective, degree=1)[0].rings] == [(4, 4)]


@pytest.mark.parametrize("run", [elementwise, selective], ids=["elementwise", "selective"])
def test_backward_may_run_twice(run: Run) -> None:
    ring, layer = Ring(shard_layout((6,), 1)), Layer()
    loss = run(layer, torch.ones(1, 6, WIDTH, dtype=torch.float64), ring).sum()
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(layer.parameters()))))


def saved_bytes(run: Run) -> int:
    """Bytes that are held between forward and backward, beside weights and inputs."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer, ring = Layer(), Ring(shard_layout((64,), 1))
    hidden = torch.ones(1, 64, WIDTH, dtype=torch.float64, requires_grad=True)
    import fcp_cli.runtime.recompute as module

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patch.setattr(module, "_keep", lambda tensor: (pack(tensor), tensor._version))
        run(layer, hidden, ring)
    return sum(seen.values())


def test_selective_recomputation_keeps_the_input_and_what_attention_saves() -> None:
    tokens, value_bytes = 64, 8
    widths = WIDTH + 2 * (4 * WIDTH + HEADS)  # input; per call q, k, v, out and lse
    assert saved_bytes(full) == tokens * WIDTH * value_bytes
    assert saved_bytes(selective) == tokens * widths * value_bytes
    assert saved_bytes(whole) > saved_bytes(selective)


def test_a_layer_that_attends_more_often_when_recomputed_is_refused() -> None:
    calls = 0

    def block(hidden: Tensor, ring: Ring) -> Tensor:
        nonlocal calls
        calls += 1
        for _ in range(calls):
            hidden = attention(hidden, hidden, hidden, ring=ring)
        return hidden.exp()

    hidden = torch.ones(1, 1, 4, 8, requires_grad=True)
    out = checkpoint(block, hidden, Ring(shard_layout((4,), 1)), use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(RunError, match="called attention 1 times in forward and more often"):
        torch.autograd.backward(out.sum())


def test_what_attention_has_kept_may_not_be_changed_in_place() -> None:
    """Of the inputs, PyTorch no longer finds out by itself; changing the output, it always refuses."""

    def block(hidden: Tensor, ring: Ring) -> Tensor:
        q = hidden * 2
        out = attention(q, hidden, hidden, ring=ring)
        return out + q.mul_(3)

    hidden = torch.ones(1, 1, 4, 8, requires_grad=True)
    out = checkpoint(block, hidden, Ring(shard_layout((4,), 1)), use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(RunError, match="an input of attention was changed in place"):
        torch.autograd.backward(out.sum())


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("run", "again"), [(whole, 0), (elementwise, 1), (selective, 3)], ids=["whole", "elementwise", "selective"]
)
def test_only_the_last_product_runs_again_where_products_are_kept(run: Run, again: int) -> None:
    """The layer's three matrices: the last one's output is read by tanh, and so computed again."""
    ring = Ring(shard_layout((8,), 1))
    loss = run(Layer(), torch.ones(1, 8, WIDTH, dtype=torch.float64, requires_grad=True), ring).sum()
    with _Products() as count:  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
    assert count.number == 2 * 3 + again


def test_a_kept_product_may_not_be_changed_in_place() -> None:
    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        return ((hidden @ weight).mul_(3).tanh() @ weight).tanh()

    hidden, weight = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    out = checkpoint(block, hidden, weight, use_reentrant=False, context_fn=keep_products)
    with pytest.raises(RunError, match="the output of a matrix product was changed in place"):
        torch.autograd.backward(out.sum())


def test_a_layer_that_runs_other_products_when_recomputed_is_refused() -> None:
    calls = 0

    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        first = torch.addmm(hidden, hidden, weight) if calls > 1 else hidden @ weight
        return first.tanh() @ weight

    hidden, weight = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    out = checkpoint(block, hidden, weight, use_reentrant=False, context_fn=keep_products)
    with pytest.raises(RunError, match="in its place when it was computed again"):
        torch.autograd.backward(out.sum())


def test_a_recomputed_layer_finds_out_before_its_first_hop_that_it_may_not_run_now() -> None:
    ring = Ring(shard_layout((4,), 1))
    hidden = torch.ones(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    out = full(Layer(), hidden, ring)
    ring.context.backward_forbidden = "not now"
    calls = ring.attention_calls
    with pytest.raises(RunError, match="not now"):
        torch.autograd.backward(out.sum())
    assert ring.attention_calls == calls
