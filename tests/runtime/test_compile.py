"""torch.compile around attention: one graph for all packs, and what eager mode computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring, current_ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.verification.emulation import Mailbox, ThreadTransport

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, LAYERS = 4, 2, 8, 6, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)
        self.v = nn.Linear(HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM)
        self.out = nn.Linear(HEADS * VALUE_DIM, HEADS * HEAD_DIM)

    def forward(self, x: Tensor, ring: Ring | None) -> Tensor:
        heads = self.qk(x).view(1, x.shape[1], -1, HEAD_DIM).transpose(1, 2)
        q, k = heads.split((HEADS, KV_HEADS), dim=1)
        v = self.v(x).view(1, x.shape[1], -1, VALUE_DIM).transpose(1, 2)
        out: Tensor = self.out(attention(q, k, v, ring=ring).transpose(1, 2).flatten(2))
        return x + out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, ring: Ring | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, ring)
        return x


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield Model().double()
    torch._dynamo.reset()


def graphs_of(model: Model) -> tuple[Any, list[int]]:
    """The compiled model, and a list that grows with every graph; backward is traced, too."""
    from torch._dynamo.backends.debugging import aot_eager

    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    return torch.compile(model, backend=backend), sizes


def run(model: Any, ring: Ring, x: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and the weights."""
    x = x.clone().requires_grad_()
    out: Tensor = model(x, ring)
    parameters = [x, *model.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters)]


def test_a_model_of_two_layers_is_one_graph_without_a_break_for_all_packs(model: Model) -> None:
    compiled, sizes = graphs_of(model)
    for lengths in ((12,), (3, 9, 5), (20, 1), (7,)):
        ring = Ring(shard_layout(lengths, 1))
        x = torch.randn(1, sum(lengths) + 2, HEADS * HEAD_DIM, dtype=torch.float64)  # with padding
        for found, expected in zip(run(compiled, ring, x), run(model, ring, x), strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        assert (ring.attention_calls, ring.context.backward_calls) == (2 * LAYERS, 2 * LAYERS)
    assert sum(counters["graph_break"].values()) == 0
    assert len(sizes) <= 2, "one for the first lengths, one for any"


class ByHeads(Layer):
    def forward(self, x: Tensor, ring: Ring | None) -> Tensor:
        heads = self.qk(x).view(1, x.shape[1], -1, HEAD_DIM).transpose(1, 2).contiguous()
        q, k = (part.contiguous() for part in heads.split((HEADS, KV_HEADS), dim=1))
        out: Tensor = self.qk(attention(q, k, k, ring=ring).transpose(1, 2).contiguous().view(*x.shape))
        return out


def test_queries_that_lie_in_the_order_of_heads_run_in_compiled_models(model: Model) -> None:
    layer = ByHeads().double()
    model.layers = nn.ModuleList([layer])
    compiled, _ = graphs_of(model)
    ring, x = Ring(shard_layout((12,), 1)), torch.randn(1, 12, HEADS * HEAD_DIM, dtype=torch.float64)
    parameters = list(layer.qk.parameters())
    found, expected = (torch.autograd.grad(call(x, ring).square().sum(), parameters) for call in (compiled, model))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("heads_degree", [1, 2])
def test_groups_of_several_members_run_in_compiled_models(model: Model, heads_degree: int) -> None:
    compiled, _ = graphs_of(model)
    layout, mailbox = shard_layout((9, 4), 2, heads_degree), Mailbox()
    rings = [Ring(layout, rank, (0, 1), ThreadTransport(mailbox, rank)) for rank in (0, 1)]
    shards = [torch.randn(1, layout.tokens(rank), HEADS * HEAD_DIM, dtype=torch.float64) for rank in (0, 1)]
    alone = Ring(shard_layout((5,), 1))
    run(compiled, alone, shards[0][:, :5])  # traced before the threads begin
    run(compiled, alone, shards[0][:, :6])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, [compiled] * 2, rings, shards))
        expected = list(pool.map(run, [model] * 2, rings, shards))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(one, other, strict=True))


def test_a_compiled_model_finds_the_current_ring_when_it_runs(model: Model) -> None:
    compiled, _ = graphs_of(model)
    x = torch.randn(1, 6, HEADS * HEAD_DIM, dtype=torch.float64)
    for lengths in ((6,), (2, 4)):
        ring = Ring(shard_layout(lengths, 1))
        token = current_ring.set(ring)
        assert torch.allclose(compiled(x), model(x, ring), rtol=0, atol=1e-12)
        current_ring.reset(token)
    with pytest.raises(RunError, match="outside a micro-batch"):
        compiled(x)


def test_a_backward_after_the_ring_is_gone_is_refused(model: Model) -> None:
    compiled, _ = graphs_of(model)
    x = torch.randn(1, 6, HEADS * HEAD_DIM, dtype=torch.float64)
    out = compiled(x, Ring(shard_layout((6,), 1)))
    with pytest.raises(RunError, match="after its step had ended"):
        out.sum().backward()
