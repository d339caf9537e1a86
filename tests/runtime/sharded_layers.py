"""Layers that mix tokens, computed by all members of a group on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.verification.emulation import Meeting, ThreadTransport, run_ranks
from fcp_cli.verification.recording import RecordingTransport
from tests.runtime.emulation import unshard

PACKS = [(1,), (3, 1, 2), (9, 26), (6, 6, 6)]
GROUPS = [(degree, 1) for degree in range(1, 9)] + [(2, 2), (4, 2), (6, 2), (4, 4)]
"""Degrees, each with how many members share the heads."""

WIDTH = 24
"""Of the hidden states of layers."""
Shards = list[Tensor]


def on_ranks(
    lengths: tuple[int, ...],
    group: tuple[int, int],
    inputs: Shards,
    grad_out: Tensor,
    compute: Callable[[Shards, Ring], Tensor],
    *,
    parameters: Shards | None = None,
    padding: int = 0,
) -> tuple[Shards, list[Ring]]:
    """What comes out of the shards of a group's members, put together again, the gradients of `inputs`, of `parameters`
    the sums of all members' gradients, and the rings.

    `compute` is given a member's share of `inputs`, [1, tokens, ...] each, and then `parameters`.
    """
    layout, shared = shard_layout(lengths, *group), parameters or []

    def run(meeting: Meeting, rank: int) -> tuple[Shards, Shards, Ring]:
        own = torch.from_numpy(layout.index(rank))
        padded = padding or int(not len(own))  # a model is called with a token at least
        ring = Ring(layout, rank, tuple(range(group[0])), ThreadTransport(meeting.mailbox, rank, 60.0))
        leaves = [
            torch.cat((tensor[own], tensor.new_ones(padded, *tensor.shape[1:]))).requires_grad_() for tensor in inputs
        ]
        copies = [tensor.clone().requires_grad_() for tensor in shared]
        out = compute([*(leaf[None] for leaf in leaves), *copies], ring)[0]
        wanted = torch.cat((grad_out[own], grad_out.new_zeros(padded, *grad_out.shape[1:])))
        grads = torch.autograd.grad(out, [*leaves, *copies], wanted)
        found = [out.detach(), *grads[: len(leaves)]]
        assert not any(grad[len(own) :].any() for grad in found[1:])
        return [tensor[: len(own)] for tensor in found], list(grads[len(leaves) :]), ring

    found = run_ranks(group[0], run)
    shards = [unshard(layout, list(parts)) for parts in zip(*(shard for shard, _, _ in found), strict=True)]
    summed = [torch.stack(parts).sum(0) for parts in zip(*(grads for _, grads, _ in found), strict=True)]
    return [*shards, *summed], [ring for _, _, ring in found]


def require_equal(found: Shards, wanted: Shards) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 1e-12


def bytes_of_first_member(lengths: tuple[int, ...], degree: int, run: Callable[[Ring], None]) -> int:
    """Bytes that the first member of a group keeps for the backward of what all run."""
    layout, held = shard_layout(lengths, degree), {}
    kept: Shards = []

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    def of_member(meeting: Meeting, rank: int) -> None:
        ring = Ring(layout, rank, tuple(range(degree)), ThreadTransport(meeting.mailbox, rank, 60.0))
        with nullcontext() if rank else torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(ring)

    run_ranks(degree, of_member)
    return sum(held.values())


class Passes(NamedTuple):
    """What forwards and backwards on one rank leave: gradients, contents of what was sent, and rings."""

    grads: list[Tensor]
    sent: list[str]
    rings: list[Ring]


def train_layers(
    layers: Sequence[Sequence[nn.Module]],
    packs: Sequence[tuple[int, ...]],
    run_of: Callable[[int], Callable[..., Tensor]],
) -> list[Passes]:
    """All forwards of packs through each rank's layers [1, tokens, WIDTH] on one ring, then their backwards.

    `run_of(rank)` runs a layer: (its number, it, hidden states, ring) -> hidden states.
    """

    def one(meeting: Meeting, rank: int) -> Passes:
        record, run, losses = RecordingTransport(ThreadTransport(meeting.mailbox, rank)), run_of(rank), []
        members = tuple(range(len(layers)))
        rings = [Ring(shard_layout(pack, len(layers)), rank, members, record) for pack in packs]
        for number, ring in enumerate(rings):
            draw = torch.Generator().manual_seed(rank + 10 * number)
            hidden = torch.randn(1, ring.tokens, WIDTH, generator=draw, dtype=torch.float64)
            for index, layer in enumerate(layers[rank]):
                hidden = run(index, layer, hidden, ring)
            losses.append(hidden.square().sum())
        for loss in losses:
            torch.autograd.backward(loss)
        grads = [weight.grad for layer in layers[rank] for weight in layer.parameters() if weight.grad is not None]
        return Passes(grads, [one.content for one in record.operations if one.verb == "send"], rings)

    return run_ranks(len(layers), one)
