"""Verifies a plan on this machine: compares gradients computed on its ranks with a single process.

As a program (`python -m fcp_cli.verification.verify PLAN FOLDER`, under torchrun), it is one of the ranks, as a gloo
process, and writes its result or its error line to the folder.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.file import PlanReader, plan_writer, read_proven
from fcp_cli.plan.metadata import planned_masks
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.session import start
from fcp_cli.runtime.transport import leave_process_group
from fcp_cli.util.arrays import Int32Array
from fcp_cli.util.files import write_text_atomically
from fcp_cli.util.masks import CAUSAL, ChunkPairs, MaskRows
from fcp_cli.util.processes import torchrun_argv
from fcp_cli.verification.emulation import (
    Replayed,
    replay_alone,
    replay_rank,
    replay_threads,
    synthetic_tokens,
    tiny_config,
)
from fcp_cli.verification.order import Operation, check_order
from fcp_cli.verification.recording import BACKEND, LabellingTransport, ProcessRecorder

TOLERANCE = 1e-12
"""Maximum absolute difference of a gradient entry or loss, in fp64."""

MOST_PROCESSES = 8
MOST_THREADS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class StepVerdict:
    """Result of a replayed step; differences are maximum absolute differences over all ranks."""

    step: int
    microbatches: int
    largest_degree: int
    tokens: int
    loss: float
    loss_difference: float
    gradient_difference: float

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return self.loss_difference <= TOLERANCE and self.gradient_difference <= TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of a verification.

    Attributes:
        ranks_are: `processes` over gloo, or `threads` of one process.
        scale: factor on sequence lengths; 1 if none had to be shortened.
        longest_tokens: length of the longest replayed sequence.
        steps: results of the replayed steps.
        order_fault: why the order of messages and collectives could deadlock on another back end (see `check_order`),
            or None.
        unknown_masks: number of sequences whose masks the plan does not store; they were replayed as causal.
    """

    plan: Path
    num_ranks: int
    ranks_are: Literal["processes", "threads"]
    scale: float
    longest_tokens: int
    steps: tuple[StepVerdict, ...]
    order_fault: str | None
    unknown_masks: int = 0

    @property
    def passed(self) -> bool:
        return self.order_fault is None and all(step.passed for step in self.steps)


def verify(plan: Path, *, num_steps: int = 3, first_step: int = 0, max_length: int = 256) -> Verification:
    """Replay steps of a plan with a small fp64 model, and compare with a single process.

    Args:
        plan: plan file.
        num_steps: maximum number of steps to replay.
        first_step: first step to replay.
        max_length: longest length to replay; if exceeded, all lengths and masks are scaled down by a common factor, to
            at least 1 token, and to 1 per chunk of a pair.
    """
    metadata = read_proven(plan)
    if metadata.num_ranks > MOST_THREADS:
        raise RunError(
            f"{plan} has {metadata.num_ranks} ranks; up to {MOST_THREADS} can be emulated, "
            "so verify a plan of the same data with fewer --ranks"
        )
    steps = list(islice(PlanReader(plan).steps(first_step), num_steps))
    if not steps:
        raise RunError(f"{plan} ends after step {metadata.end_step - 1}: there is none from step {first_step} on")
    longest = max(int(step.lengths.max()) for step in steps)
    scale = min(1.0, max_length / longest)
    masks = None if metadata.mask_rows is None else metadata.mask_rows.scaled(scale)
    scaled = [replace(step, step=i, lengths=_scaled(step, scale, masks)) for i, step in enumerate(steps)]
    processes = metadata.num_ranks <= MOST_PROCESSES
    with TemporaryDirectory(prefix="fcp-verify-") as folder, _one_thread_per_rank():
        # Written to a separate plan file, so that the entire runtime is exercised.
        path = Path(folder) / "plan.parquet"
        alike = replace(metadata, tensor_parallel=1, pipeline_parallel=1, continues=None, masks=planned_masks(masks))
        with plan_writer(path, alike) as writer:
            for step in scaled:
                writer.append(step)
        config = tiny_config(path)
        ranks = replay_processes(path) if processes else replay_threads(path, config)
        alone = replay_alone(path, config)
    return Verification(
        plan=plan,
        num_ranks=metadata.num_ranks,
        ranks_are="processes" if processes else "threads",
        scale=scale,
        longest_tokens=max(int(step.lengths.max()) for step in scaled),
        steps=tuple(_verdicts(steps, scaled, ranks, alone)),
        order_fault=_order_fault(ranks),
        unknown_masks=0 if metadata.masks is not None else metadata.masked_sequences or 0,
    )


def _scaled(step: StepPlan, scale: float, masks: MaskRows | None) -> Int32Array:
    """Return the lengths to replay, [sequences], at least 1; for chunk pairs the sum of their chunks.

    Causal sequences that are shortened get odd lengths, whose chunks are unequal in rings.
    """
    lengths: Int32Array = np.maximum(np.floor(step.lengths * scale), 1).astype(np.int32)
    if masks is None and scale < 1:
        lengths -= (lengths % 2 == 0).astype(np.int32)
    for place, row in enumerate(step.sequences.tolist()):
        mask = CAUSAL if masks is None else masks.mask(row)
        if isinstance(mask, ChunkPairs):
            lengths[place] = 2 * sum(mask.sizes)
    return lengths


def _verdicts(
    steps: Sequence[StepPlan], scaled: Sequence[StepPlan], ranks: Sequence[Replayed], alone: Replayed
) -> Iterator[StepVerdict]:
    for i, (step, small) in enumerate(zip(steps, scaled, strict=True)):
        yield StepVerdict(
            step=step.step,
            microbatches=len(step),
            largest_degree=int(step.degrees.max()),
            tokens=int(small.lengths.sum()),
            loss=float(alone.losses[i]),
            loss_difference=max(abs(float(rank.losses[i] - alone.losses[i])) for rank in ranks),
            gradient_difference=max(float(np.abs(rank.gradients[i] - alone.gradients[i]).max()) for rank in ranks),
        )


def _order_fault(ranks: Sequence[Replayed]) -> str | None:
    try:
        check_order({rank: replayed.operations for rank, replayed in enumerate(ranks)})
    except RunError as error:
        return str(error)
    return None


@contextmanager
def _one_thread_per_rank() -> Iterator[None]:
    """Run torch on one thread: emulated ranks already share this machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def replay_processes(plan: Path) -> list[Replayed]:
    """Replay all steps of a plan with a process per rank; return each rank's losses and gradients."""
    folder = plan.parent
    num_ranks = PlanReader(plan).metadata.num_ranks
    done = subprocess.run(
        [*torchrun_argv(num_ranks), "-m", "fcp_cli.verification.verify", str(plan), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"replaying the plan failed: {_reason(folder, done.stderr)}")
    # Pickle is safe here: our own processes wrote these files to our own temporary folder.
    return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _reason(folder: Path, stderr: str) -> str:
    for path in sorted(folder.glob("rank-*.error")):
        return path.read_text(encoding="utf-8")
    return (stderr.strip().splitlines() or ["torchrun printed nothing"])[-1]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def run_rank(plan: Path, folder: Path) -> None:
    """Replay the plan as one of its ranks, and write the result or the error to the folder."""
    config, recorder = tiny_config(plan), ProcessRecorder()
    torch.set_num_threads(1)
    recorder.register()
    dist.init_process_group(BACKEND)
    try:
        with start(plan, synthetic_tokens(plan, config.vocab_size), device=torch.device("cpu")) as session:
            session.transport = LabellingTransport(session.transport, recorder)
            replayed = replay_rank(session, config, on_gather=lambda: _gather(recorder))
            replayed = replace(replayed, operations=recorder.operations)
            _result(folder, session.rank).write_bytes(pickle.dumps(replayed))
        leave_process_group()
    except FcpError as error:
        write_text_atomically(folder / f"rank-{os.environ['RANK']}.error", str(error))
        raise


def _gather(recorder: ProcessRecorder) -> None:
    """Record a collective without running it, so that a rank that skips one is found instead of waited for."""
    recorder.waited(recorder.issue([Operation(group="world", verb="gather weights", batch=0)]))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
