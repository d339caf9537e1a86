"""All members of a ring in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from fcp_cli.runtime.grad_ring import GradRingDtype
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.ring import Ring, ring_backward, ring_forward
from fcp_cli.verification.emulation import LockstepTransport, Mailbox, run_lockstep
from fcp_cli.verification.order import Operation
from fcp_cli.verification.recording import RecordingTransport
from tests.runtime.reference import Example


def run_emulated(example: Example, degree: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) of the whole pack, put together again from the shards of `degree` members."""
    results, _ = run_recorded(example, tuple(range(degree)), dtype)
    return results


def run_recorded(
    example: Example,
    ranks: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    grad_dtype: GradRingDtype = "fp32",
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[int, list[Operation]]]:
    """As `run_emulated`, with what every rank sent and received."""
    layout, mailbox = shard_layout(example.lengths, len(ranks)), Mailbox()
    recorders = [RecordingTransport(LockstepTransport(mailbox, rank)) for rank in ranks]
    rings = [Ring(layout, i, ranks, recorder, grad_dtype=grad_dtype) for i, recorder in enumerate(recorders)]
    shards = [_shard(example, layout, i, dtype) for i in range(len(ranks))]
    forward = run_lockstep(
        [ring_forward(ring, q, k, v, example.scale) for ring, (q, k, v, _) in zip(rings, shards, strict=True)]
    )
    backward = run_lockstep(
        [
            ring_backward(ring, grad_out, q, k, v, out, lse, example.scale)
            for ring, (q, k, v, grad_out), (out, lse) in zip(rings, shards, forward, strict=True)
        ]
    )
    out = unshard(layout, [out for out, _ in forward])
    dq, dk, dv = (unshard(layout, list(parts)) for parts in zip(*backward, strict=True))
    return (out, dq, dk, dv), {rank: recorder.operations for rank, recorder in zip(ranks, recorders, strict=True)}


def _shard(example: Example, layout: ShardLayout, index: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(q, k, v, grad_out) of one member."""
    own = torch.from_numpy(layout.index(index))
    return tuple(tensor[own].to(dtype) for tensor in (example.q, example.k, example.v, example.grad_out))


def unshard(layout: ShardLayout, shards: list[Tensor]) -> Tensor:
    """The pack in its own order."""
    order = torch.cat([torch.from_numpy(layout.index(i)) for i in range(layout.degree)])
    return torch.cat(shards)[order.argsort()]
