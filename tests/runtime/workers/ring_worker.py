"""One rank of a job that runs many micro-batches on ever changing rings; rank 0 prints what came out as JSON.

Run by torchrun. Every rank knows the whole schedule and the whole of every pack, so it checks its own shard.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring, current_ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.transport import ProcessTransport, Transport
from fcp_cli.util.masks import Mask
from fcp_cli.verification.order import Operation, check_order
from fcp_cli.verification.recording import RecordingTransport
from tests.masks import random_mask
from tests.runtime.reference import HEADS, PACKS, absolute_error, can_share, make_example
from tests.runtime.workers.leave import join_job, leave_job

MODES = ["plain", "reentrant", "non-reentrant"]
RANDOM_STEPS = 12
HEAD_DIM = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One micro-batch: a pack on some ranks, of which each `heads_degree` share the heads.

    Half of them have masks, most of the others windows.
    """

    ranks: tuple[int, ...]
    heads_degree: int
    lengths: tuple[int, ...]
    masks: tuple[Mask, ...]
    window: int | None
    heads: tuple[int, int]
    value_dim: int
    dtype: torch.dtype
    mode: str
    seed: int


def fixed_partitions(world_size: int) -> list[list[tuple[int, ...]]]:
    """Degrees from 1 to the world size, and groups that are not contiguous."""
    partitions: list[list[tuple[int, ...]]] = [
        [(0, 3), (1, 2)],
        [(0, 2, 3), (1,)],
        [(0, 2), (1, 3)],
        [(0,), (1,), (2,), (3,)],
        [(0, 1, 2, 3)],
        [(0, 1, 3), (0, 2), (1, 2, 3), (3,), (0, 3)],  # not disjoint: some ranks run three micro-batches, some two
    ]
    if world_size == 5:
        partitions += [[(0, 1, 2, 3, 4)], [(0, 4), (1, 2, 3)], [(4,), (0, 1, 3, 4), (0, 1, 2, 3, 4)]]
    return partitions


def random_groups(generator: random.Random, world_size: int) -> list[tuple[int, ...]]:
    """Some groups of any ranks; together they need not be a partition."""
    sizes = [generator.randint(1, world_size) for _ in range(generator.randint(1, 4))]
    return [tuple(sorted(generator.sample(range(world_size), size))) for size in sizes]


def make_steps(world_size: int) -> list[list[Job]]:
    generator = random.Random(world_size)
    groups = fixed_partitions(world_size) + [random_groups(generator, world_size) for _ in range(RANDOM_STEPS)]
    return [[make_job(generator, ranks) for ranks in step] for step in groups]


def make_job(generator: random.Random, ranks: tuple[int, ...]) -> Job:
    degrees = [u for u in range(1, len(ranks) + 1) if not len(ranks) % u]
    shared = generator.choice([u for u in degrees if any(can_share(heads, u) for heads in HEADS)])
    lengths = generator.choice([*PACKS, tuple(generator.randint(1, 40) for _ in range(generator.randint(1, 5)))])
    of_lengths = random.Random(str(lengths))
    is_masked = of_lengths.random() < 0.5
    masks = tuple(random_mask(of_lengths, length) for length in lengths) if is_masked else ()
    return Job(
        ranks=ranks,
        heads_degree=shared,
        lengths=lengths,
        masks=masks,
        window=of_lengths.choice([None, 2, 5, 30]) if all(mask.has_windows for mask in masks) else None,
        heads=generator.choice([heads for heads in HEADS if can_share(heads, shared)]),
        value_dim=generator.choice([HEAD_DIM, HEAD_DIM, 5, 11]),
        dtype=generator.choice([torch.float64, torch.float64, torch.float32]),
        mode=generator.choice(MODES),
        seed=generator.randrange(2**31),
    )


class Attempt:
    """One rank's share of a job: attention, forward and backward, against the whole pack on one device."""

    def __init__(self, job: Job, rank: int, transport: Transport) -> None:
        pack: dict[str, Any] = {"masks": job.masks, "value_dim": job.value_dim, "window": job.window}
        self.job = job
        self.example = make_example(job.lengths, job.heads, HEAD_DIM, job.seed, job.dtype, **pack)
        member = job.ranks.index(rank)
        layout = shard_layout(job.lengths, len(job.ranks), job.heads_degree, job.masks)
        self.ring = Ring(layout, member, job.ranks, transport)
        self.index = torch.from_numpy(layout.index(member))
        whole = self.example.q, self.example.k, self.example.v, self.example.grad_out
        *leaves, self.grad_out = (
            tensor[self.index].to(job.dtype).transpose(0, 1)[None].contiguous() for tensor in whole
        )
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.out = self.leaves[0]

    def forward(self) -> None:
        if self.job.mode == "plain":
            token = current_ring.set(self.ring)
            self.out = attention(*self.leaves, window=self.job.window)
            current_ring.reset(token)
        else:
            explicit = partial(attention, ring=self.ring, window=self.job.window)
            self.out = checkpoint(explicit, *self.leaves, use_reentrant=self.job.mode == "reentrant")

    def backward(self) -> float:
        """Run it; returns how far this rank is from the truth, as a share of what is allowed."""
        torch.autograd.backward(self.out, self.grad_out)
        found = (self.out, *(leaf.grad for leaf in self.leaves))
        return max(self._error(*pair) for pair in zip(found, self.example.results, strict=True))

    def _error(self, found: Tensor | None, expected: Tensor) -> float:
        assert found is not None
        local = found.detach()[0].transpose(0, 1)
        if self.job.dtype == torch.float64:
            return absolute_error(local, expected[self.index]) / 1e-12
        # Relative to the whole tensor: a shard of a few tokens has no norm of its own to speak of. Where all sequences
        # are single tokens, dq and dk are exactly 0 and some CPUs' kernels leave rounding: relative to what flows in.
        share = (local.double() - expected[self.index]).norm() / (expected.norm() or self.example.grad_out.norm())
        return float(share) / 2e-6


def run_step(jobs: list[Job], rank: int, transport: Transport) -> float:
    """Two forwards before the first backward, all through the step; every rank in the same order of jobs."""
    errors = [0.0]
    for i in range(0, len(jobs), 2):
        attempts = [Attempt(job, rank, transport) for job in jobs[i : i + 2] if rank in job.ranks]
        for attempt in attempts:
            attempt.forward()
        errors += [attempt.backward() for attempt in attempts]
    return max(errors)


def main() -> None:
    rank, world_size = join_job(), dist.get_world_size()
    transport = ProcessTransport.create(torch.device("cpu"))
    transport._staged = "--staged" in sys.argv
    recorder = RecordingTransport(transport)
    communicators = count_communicators()

    steps = make_steps(world_size)
    worst = torch.zeros(1, dtype=torch.float64)
    for jobs in steps:
        error = torch.tensor([run_step(jobs, rank, recorder)], dtype=torch.float64)
        recorder.record_collective("all_reduce", error)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        worst = torch.maximum(worst, error)
    created = count_communicators() - communicators

    logs: list[Any] = [None] * world_size
    dist.all_gather_object(logs, recorder.operations)
    if rank == 0:
        report = {"worst_share_of_tolerance": float(worst), "communicators_created": created, "num_ranks": world_size}
        print(json.dumps(report | describe(steps) | describe_order(logs)), flush=True)
    leave_job()


def count_communicators() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def describe(steps: list[list[Job]]) -> dict[str, Any]:
    jobs = [job for step in steps for job in step]
    return {
        "degrees": sorted({len(job.ranks) for job in jobs}),
        "sharing": sorted({(job.heads_degree, len(job.ranks) // job.heads_degree) for job in jobs}),
        "value_dims": sorted({job.value_dim for job in jobs}),
        "modes": sorted({job.mode for job in jobs}),
        "dtypes": sorted({str(job.dtype) for job in jobs}),
        "groups": len({job.ranks for job in jobs}),
        "windowed": sorted({len(job.ranks) for job in jobs if job.window is not None}),
        "windowed and masked": sum(job.window is not None and bool(job.masks) for job in jobs),
        "masked": sorted({(len(job.ranks), job.mode) for job in jobs if any(not mask.is_causal for mask in job.masks)}),
    }


def describe_order(logs: list[list[Operation]]) -> dict[str, Any]:
    try:
        check_order(dict(enumerate(logs)))
        fault = ""
    except RunError as error:
        fault = str(error)
    return {"messages": sum(map(len, logs)), "order_fault": fault}


if __name__ == "__main__":
    main()
