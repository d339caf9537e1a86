"""All members of a ring in one process, and how far they may be from plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.lockstep import LockstepTransport, run_lockstep
from fcp_cli.runtime import ring_passes
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.kernels import AttentionKernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import group_backward, group_forward
from fcp_cli.verification.emulation import Mailbox
from fcp_cli.verification.order import Operation
from fcp_cli.verification.recording import RecordingTransport
from tests.runtime.reference import Example, absolute_error, relative_error

# Relative and absolute; a sink's gradient sums over all rows.
TOLERANCES_OF_SINKS = {torch.float64: (0.0, 1e-12), torch.float32: (2e-5, 2e-6), torch.bfloat16: (5e-2, 5e-2)}


class GatheringCpuKernel(CpuKernel):
    """All sequences in one call, whose rows the ring then has to gather and scatter, as on a GPU."""

    packed = True


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: AttentionKernel) -> None:
    """Have rings call a kernel, whatever their tensors are."""
    monkeypatch.setattr(ring_passes, "select_kernel", lambda device_type, dtype: kernel)


def require_exact(example: Example, degree: int, heads_degree: int = 1, dtype: torch.dtype = torch.float64) -> None:
    """Require the results of plain attention: in fp64 within 1e-12, in fp32 within 2e-6 of their size."""
    for found, expected in zip(run_emulated(example, degree, dtype, heads_degree), example.results, strict=True):
        if dtype == torch.float64:
            assert absolute_error(found, expected) <= 1e-12, (degree, heads_degree)
        else:
            assert relative_error(found, expected) <= 2e-6, (degree, heads_degree)


def require_error_of_one_device(found: tuple[Tensor, ...], example: Example) -> None:
    """Require of results in bf16 at most twice the error that one device has."""
    alone = run_emulated(example, 1, torch.bfloat16)
    assert found[0].dtype == alone[0].dtype == torch.bfloat16
    for one, own, expected in zip(found, alone, example.results, strict=True):
        assert relative_error(one, expected) <= 2 * relative_error(own, expected)


def run_emulated(
    example: Example, degree: int, dtype: torch.dtype, heads_degree: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) of the whole pack, put together again from the shards of `degree` members."""
    results, _ = run_recorded(example, tuple(range(degree)), dtype, heads_degree=heads_degree)
    return results


def run_recorded(
    example: Example,
    ranks: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    grad_dtype: GradRingDtype = "fp32",
    heads_degree: int = 1,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[int, list[Operation]]]:
    """As `run_emulated`, with what every rank sent and received."""
    layout = shard_layout(example.lengths, len(ranks), heads_degree, example.masks)
    members, recorders = recorded_members(layout, ranks, grad_dtype)
    shards = [_shard(example, layout, i, dtype) for i in range(len(ranks))]
    sinks = None if example.sinks is None else example.sinks.to(dtype)
    spec = AttentionSpec(example.scale, example.window, example.softcap)
    forward = run_lockstep(
        [group_forward(member, q, k, v, spec, sinks) for member, (q, k, v, _) in zip(members, shards, strict=True)]
    )
    backward = run_lockstep(
        [
            group_backward(
                member,
                grad_out,
                kept,
                spec,
                sinks,
                kv_heads=example.k.shape[1],
            )
            for member, (_, _, _, grad_out), (_, kept) in zip(members, shards, forward, strict=True)
        ]
    )
    out = unshard(layout, [out for out, _ in forward])
    *grads, of_sinks = zip(*backward, strict=True)
    dq, dk, dv = (unshard(layout, list(parts)) for parts in grads)
    if sinks is not None:  # like that of any weight: each member's share, summed
        assert example.dsinks is not None
        found, (rtol, atol) = torch.stack(of_sinks).double().sum(0), TOLERANCES_OF_SINKS[dtype]
        torch.testing.assert_close(found, example.dsinks, rtol=rtol, atol=atol)
    return (out, dq, dk, dv), {rank: recorder.operations for rank, recorder in recorders.items()}


def recorded_members(
    layout: ShardLayout, ranks: tuple[int, ...], grad_dtype: GradRingDtype = "fp32"
) -> tuple[list[Ring], dict[int, RecordingTransport]]:
    """Return the members of a group for `run_lockstep`, and the recorders of their messages by rank."""
    mailbox = Mailbox()
    recorders = {rank: RecordingTransport(LockstepTransport(mailbox, rank)) for rank in ranks}
    return [Ring(layout, i, ranks, recorder, grad_dtype) for i, recorder in enumerate(recorders.values())], recorders


def _shard(example: Example, layout: ShardLayout, index: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(q, k, v, grad_out) of one member."""
    own = torch.from_numpy(layout.index(index))
    return tuple(tensor[own].to(dtype) for tensor in (example.q, example.k, example.v, example.grad_out))


def unshard(layout: ShardLayout, shards: list[Tensor]) -> Tensor:
    """The pack in its own order."""
    order = torch.cat([torch.from_numpy(layout.index(i)) for i in range(layout.degree)])
    return torch.cat(shards)[order.argsort()]
