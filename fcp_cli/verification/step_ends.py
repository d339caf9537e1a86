"""Checks plan steps that end with a ring on only some of its members, under each gradient reduction.

The possible deadlock: a rank issues a gradient reduction or gather while another still waits for it in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fcp_cli import __version__
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.plan.step import StepPlan, offsets_of
from fcp_cli.runtime.plan_agreement import agree_on_plan
from fcp_cli.runtime.session import Session
from fcp_cli.util.findings import Finding
from fcp_cli.verification.checks import Bench
from fcp_cli.verification.emulation import gradients_on_rank, synthetic_tokens
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend

_CONFIG = TinyConfig(width=64, heads=4, kv_heads=2)  # head size 16: accelerator kernels need multiples of 8
_STEPS = 3
Wrapper: TypeAlias = Callable[[nn.Module, torch.device], nn.Module]
_SAME_LOSS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A micro-batch: ranks, sequence ids and lengths, and wave; without sequences it is idle."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    wave: int = -1


def check_order(bench: Bench) -> Finding:
    """Check that the steps finish without a deadlock, with equal losses, under each wrapper."""
    if bench.world.size == 1:
        return Finding(name="order", passed=None, lines=("a single rank waits for no other",))
    losses: dict[str, list[float]] = {}
    for name, (sync, wrap) in _WRAPPERS.items():
        bench.begin(f"order: {name} under sync {sync}")
        losses[f"{name} ({sync})"] = _losses(bench, sync, wrap)
    first = next(iter(losses.values()))
    bound = _SAME_LOSS[bench.dtype]
    agree = all(np.allclose(found, first, rtol=bound, atol=0.0) for found in losses.values())
    names = ", ".join(losses)
    verdict = "ended with the same losses" if agree else "ended with DIFFERENT losses"
    return Finding(
        name="order",
        passed=agree,
        lines=(f"{_STEPS} steps whose last rings differ by rank {verdict}: {names}",),
        figures={"losses": losses},
    )


def _losses(bench: Bench, sync: Sync, wrap: Wrapper) -> list[float]:
    plan = bench.settings.folder / f"order-{sync}.parquet"
    if bench.is_first:
        write_plan(plan, bench.world.size, sync)
    dist.barrier()
    metadata = agree_on_plan(bench.world, plan, bench.device)
    model = TinyLanguageModel(_CONFIG, ring_attend, seed=0, dtype=bench.dtype).to(bench.device)
    wrapped = wrap(model, bench.device)
    session = Session(
        plan=plan,
        metadata=metadata,
        fetch=synthetic_tokens(plan, _CONFIG.vocab_size),
        world=bench.world,
        transport=bench.transport,
        device=bench.device,
        owns_process_group=False,
    )
    with session:
        replayed = gradients_on_rank(
            session, wrapped, lambda mb: mb.loss(wrapped(mb.input_ids, mb.position_ids, mb.ring))
        )
    losses: list[float] = replayed.losses.tolist()
    return losses


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index or 0])


def _fsdp2(model: nn.Module, device: torch.device, *, keeps_weights: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps_weights)
    fully_shard(model, mesh=mesh)
    return model


_WRAPPERS: Mapping[str, tuple[Sync, Wrapper]] = {
    "replicas": ("iteration", lambda model, _: model),
    "DDP": ("iteration", _ddp),
    "FSDP2 that keeps weights": ("iteration", partial(_fsdp2, keeps_weights=True)),
    "FSDP2 that gathers layers": ("microbatch", partial(_fsdp2, keeps_weights=False)),
}


def write_plan(path: Path, num_ranks: int, sync: Sync) -> None:
    """Write a plan with steps of the same sequences for a sync; see `rows_of_step`."""
    metadata = PlanMetadata(
        fcp_version=__version__,
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
        sync=sync,
        global_batch_size=2 * num_ranks,
        tokens_per_rank=4096,
        seed=0,
        shuffle=False,
        solver="selftest",
        manifest=ManifestReference(name="selftest", rows=_STEPS * 2 * num_ranks, content_hash=""),
        cost_profile="",
    )
    with plan_writer(path, metadata) as writer:
        for number in range(_STEPS):
            writer.append(_as_plan(rows_of_step(num_ranks, number, sync), number))


def rows_of_step(num_ranks: int, number: int, sync: Sync) -> list[Row]:
    """Return a ring for each pair of adjacent ranks, and a single-rank pack for every other rank.

    Under `iteration`, single-rank packs come before or after the rings, alternating by rank and step, so that a ring is
    the last micro-batch of only some of its members. Under `microbatch`, each row is a wave in which other ranks idle.
    """
    first = number * 2 * num_ranks  # first sequence of the step; equal under both syncs
    rings = [
        Row(
            ranks=(rank, rank + 1), sequences=(first + 2 * rank, first + 2 * rank + 1), lengths=(37 + number + rank, 12)
        )
        for rank in range(num_ranks - 1)
    ]
    after = first + 2 * (num_ranks - 1)
    alone = [
        Row(ranks=(rank,), sequences=(after + rank // 2,), lengths=(20 + rank,)) for rank in range(0, num_ranks, 2)
    ]
    if sync == "microbatch":
        return list(_waves([*rings, *alone], num_ranks))
    early = [row for row in alone if (row.ranks[0] // 2 + number) % 2]
    return [*early, *rings, *(row for row in alone if row not in early)]


def _waves(rows: Sequence[Row], num_ranks: int) -> Iterator[Row]:
    for wave, row in enumerate(rows):
        yield replace(row, wave=wave)
        yield from (Row(ranks=(rank,), wave=wave) for rank in range(num_ranks) if rank not in row.ranks)


def _as_plan(rows: Sequence[Row], number: int) -> StepPlan:
    seconds = np.array([float(sum(row.lengths)) / len(row.ranks) for row in rows])
    return StepPlan(
        step=number,
        wave=np.array([row.wave for row in rows], dtype=np.int32),
        rank_offsets=offsets_of([len(row.ranks) for row in rows]),
        ranks=np.array([rank for row in rows for rank in row.ranks], dtype=np.int32),
        sequence_offsets=offsets_of([len(row.lengths) for row in rows]),
        sequences=np.array([sequence for row in rows for sequence in row.sequences], dtype=np.int64),
        lengths=np.array([length for row in rows for length in row.lengths], dtype=np.int32),
        start_seconds=np.zeros(len(rows)),
        seconds=seconds,
        makespan_seconds=float(seconds.sum()),
        bound_seconds=float(seconds.max()),
    )
