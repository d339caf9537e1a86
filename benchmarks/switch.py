"""Host time between two micro-batches under a plan: from the end of one loop body to the start of the next.

    python -m benchmarks.switch [--ranks N] [--steps N]

The session runs as in training, with its plan cursor, loader and prefetching, but the model is a short sleep, in which
the loader works ahead as it does while a real model computes. Included: take the next shard, make its ring with the
segments of all its hops, make it current, switch gradient reduction, note the times. Every micro-batch has another
group, of any ranks; nothing is communicated to make one. From step to step, the check that `attention` ran and the
hand-over from the loader's thread come on top.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from torch import Tensor

from benchmarks.lockstep import LockstepTransport
from fcp_cli.plan.file import PlanReader, plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.verification.emulation import Done, Mailbox

LARGEST_SECONDS = 100e-6
MICROBATCHES_PER_STEP = 8
MODEL_SECONDS = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time to switch from one micro-batch's group to the next.")
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the plan (default 64)")
    parser.add_argument("--steps", type=int, default=40, help="steps to run (default 40)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.parquet"
        write_plan(plan, arguments.ranks, arguments.steps)
        within, between = measure(plan)
    print(f"{arguments.ranks} ranks, {arguments.steps} steps of {MICROBATCHES_PER_STEP} micro-batches, prefetched")
    report("within a step", within)
    report("from step to step", between)
    report("all", within + between)
    verdict = "ok" if median(within + between) <= LARGEST_SECONDS else "over"
    print(f"target: median of all at most {LARGEST_SECONDS * 1e6:.0f} us: {verdict}")


def write_plan(path: Path, num_ranks: int, num_steps: int) -> None:
    """Rank 0 takes part in every micro-batch, each time on another group; packs of 1 to 16 sequences."""
    metadata = PlanMetadata(
        fcp_version="benchmark",
        num_ranks=num_ranks,
        ranks_per_node=8,
        sync="iteration",
        global_batch_size=1,
        tokens_per_rank=1 << 20,
        seed=0,
        shuffle=False,
        solver="benchmark",
        manifest=ManifestReference(name="none", rows=1, content_hash=""),
        cost_profile="",
    )
    draw = random.Random(0)
    with plan_writer(path, metadata) as writer:
        for step in range(num_steps):
            writer.append(make_step(draw, step, num_ranks))


def make_step(draw: random.Random, step: int, num_ranks: int) -> StepPlan:
    degrees = [draw.choice([1, 2, 3, 4, 6, 8]) for _ in range(MICROBATCHES_PER_STEP)]
    ranks = [[0, *sorted(draw.sample(range(1, num_ranks), degree - 1))] for degree in degrees]
    lengths = [[draw.randint(100, 2000) for _ in range(draw.randint(1, 16))] for _ in degrees]
    flat = [length for pack in lengths for length in pack]
    times = np.ones(MICROBATCHES_PER_STEP)
    return StepPlan(
        step=step,
        wave=np.full(MICROBATCHES_PER_STEP, -1, dtype=np.int32),
        rank_offsets=np.cumsum([0, *degrees], dtype=np.int64),
        ranks=np.array([rank for group in ranks for rank in group], dtype=np.int32),
        sequence_offsets=np.cumsum([0, *map(len, lengths)], dtype=np.int64),
        sequences=np.arange(len(flat), dtype=np.int64),
        lengths=np.array(flat, dtype=np.int32),
        start_seconds=times,
        seconds=times,
        makespan_seconds=1.0,
        bound_seconds=1.0,
    )


class NobodyElse:
    """A world in which collectives cost nothing: they are not what is measured."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce_sum(self, tensor: Tensor) -> None:
        pass

    def start_all_reduce(self, tensor: Tensor) -> Done:
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def start_sum(self, tensor: Tensor) -> Done:
        tensor.zero_()  # what ranks that agree add up to
        return Done()

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        heard.copy_(told)


def measure(plan: Path) -> tuple[list[float], list[float]]:
    """Seconds of every switch within a step, and of every switch from one step to the next."""
    metadata = PlanReader(plan).metadata
    tokens = torch.zeros(2000, dtype=torch.int64)
    session = Session(
        plan=plan,
        metadata=metadata,
        fetch=lambda row: tokens,
        world=NobodyElse(metadata.num_ranks),
        transport=LockstepTransport(Mailbox(), 0),
        device=torch.device("cpu"),
    )
    within: list[float] = []
    between: list[float] = []
    left = None
    for step, microbatch in microbatches(session):
        use(microbatch)
        entered = time.perf_counter()
        if left is not None:
            (within if left[0] == step else between).append(entered - left[1])
        time.sleep(MODEL_SECONDS)
        left = (step, time.perf_counter())
    return within[MICROBATCHES_PER_STEP:], between[1:]  # the first step warms up


def microbatches(session: Session) -> Iterator[tuple[int, LocalMicroBatch]]:
    for step in session.steps():
        for microbatch in step:
            yield step.index, microbatch


def use(microbatch: LocalMicroBatch) -> None:
    """What the first layer's attention asks of the ring before it computes."""
    ring = microbatch.ring
    ring.attention_calls += 1
    for hop in range(ring.degree):
        ring.work(hop, packed=False)


def report(what: str, seconds: list[float]) -> None:
    middle, high = median(seconds) * 1e6, quantiles(seconds, n=10)[-1] * 1e6
    print(f"{what:<18} median {middle:6.1f} us, 90% within {high:6.1f} us")


if __name__ == "__main__":
    main()
