"""Plans and runs to draw: planned by the real planner, "measured" with a known factor per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata, Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.verdict import priced_baselines
from fcp_cli.runs.metrics import FORMAT, StepRecord, Timing, step_record
from tests.planning.examples import example_problem, long_tail

SLOW_RANK, SLOW_FACTOR = 3, 1.5


def make_example_plan(path: Path, *, sync: Sync = "iteration", seed: int = 0, num_ranks: int = 8) -> PlanMetadata:
    """Four steps over eight ranks on two nodes."""
    inputs = PlanInputs(
        table=long_tail(),
        problem=example_problem(sync, num_ranks=num_ranks),
        settings=BatchSettings(global_batch_size=60, seed=seed),
    )
    return make_plan(path, inputs, baselines=priced_baselines(inputs, "fcp", [sync]), workers=1).metadata


def run_record(metadata: PlanMetadata, plan: Path, **changes: object) -> dict[str, object]:
    return {
        "format": FORMAT,
        "kind": "run",
        "plan_hash": metadata.plan_hash,
        "plan": str(plan),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "sync": metadata.sync,
        "model": "tiny",
        "device": "cpu",
        "device_name": "test",
        "torch": "2.13.0",
        "started": "2026-01-01T00:00:00+00:00",
        "first_step": 0,
        "steps": metadata.steps,
        **changes,
    }


def measured(step: StepPlan, num_ranks: int) -> StepRecord:
    """Every micro-batch takes what was planned, times SLOW_FACTOR on SLOW_RANK."""
    ranks: list[list[Timing]] = [[] for _ in range(num_ranks)]
    for row in step.microbatches():
        for rank in row.ranks:
            factor = SLOW_FACTOR if rank == SLOW_RANK else 1.0
            ranks[rank].append((row.order, row.start_seconds * SLOW_FACTOR, row.seconds * factor))
    record = step_record(
        step,
        ranks,
        seconds=step.makespan_seconds * SLOW_FACTOR + 0.25,
        loss=5.0 - 0.1 * step.step,
        warm_up=step.step == 0,
        grad_norm=1.0,
        learning_rate=1e-4,
    )
    return cast(StepRecord, record)


def busy_seconds(record: StepRecord) -> list[float]:
    """[num_ranks] seconds in which each rank ran micro-batches."""
    return [rank["busy_seconds"] for rank in record["ranks"]]


def write_run(path: Path, plan: Path, *, records: Sequence[object] | None = None) -> Path:
    """The metrics of a whole run of `plan`."""
    reader = PlanReader(plan)
    if records is None:
        steps = [measured(step, reader.metadata.num_ranks) for step in reader.steps()]
        records = [run_record(reader.metadata, plan), *steps]
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    return path
