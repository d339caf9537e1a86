"""Plans in the form in which NeMo-RL's driver passes them to its workers: the work of each lane, its groups, in order.

The values have the names and the meaning of `nemo_rl.distributed.dynamic_context_parallel`. Its workers hold groups of
only powers of two, at multiples of their size, so steps are planned without rings by our planner, or in such groups
by the strategy `megatron-dynamic-cp`, whichever is predicted quicker. Each wave is one synchronization group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches, batch_of
from fcp_cli.planning.fcp.solver import solver_of
from fcp_cli.planning.planner import Planner
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.planning.solvers import make_solver
from fcp_cli.words import counted


def rank_plans(
    planner: Planner,
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    *,
    lane_ranks: Sequence[Sequence[int]] | None = None,
    sequence_parallel: int = 1,
    pad_multiple: int = 1,
    valid_tokens: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Return the plan of every lane, as JSON values.

    Args:
        planner: gives lanes, token budget and prices; one of `phase="forward"` for log-probabilities.
        lengths: tokens of each sample of the batch.
        steps: positions in `lengths` of each optimizer step.
        lane_ranks: global ranks of each lane; None: lane i has rank i.
        sequence_parallel: Megatron's, whose ranks share padded sequences.
        pad_multiple: each sequence is also padded to a multiple of it.
        valid_tokens: the valid tokens of each sample, that the loss counts; None: all.

    Raises:
        UsageError: the lanes are no power of two, or a step is empty.
        PlanError: a sequence needs more lanes than there are.
    """
    lanes = planner.problem.num_ranks
    if lanes & (lanes - 1):
        raise UsageError(f"NeMo-RL wants a power of two of lanes; this planner has {lanes} ranks")
    problem = _padded(planner.problem, lcm(2 * sequence_parallel, pad_multiple))
    all_lengths = np.asarray(lengths, dtype=np.int64)
    valid = all_lengths if valid_tokens is None else np.asarray(valid_tokens)
    found: list[list[dict[str, Any]]] = [[] for _ in range(lanes)]
    for number, samples in enumerate(steps):
        if not len(samples):
            raise UsageError(f"step {number} has no samples")
        here = np.asarray(samples, dtype=np.int64)
        planned = _quickest(all_lengths[here], problem, number)
        groups = [
            [_task(task, here, all_lengths, sequence_parallel, pad_multiple) for task in wave]
            for wave in _waves(planned, lanes)
        ]
        for lane, its_steps in enumerate(found):
            tasks = (next(one for one in wave if _has(one, lane)) for wave in groups)
            its_steps.append(
                {
                    "groups": [{"assignments": [task]} for task in tasks],
                    "valid_sequences": float(len(here)),
                    "valid_tokens": float(valid[here].sum()),
                }
            )
    ranks = [list(lane) for lane in lane_ranks] if lane_ranks is not None else [[lane] for lane in range(lanes)]
    return [{"lane": lane, "lane_ranks": ranks[lane], "steps": its_steps} for lane, its_steps in enumerate(found)]


def as_rank_plan(document: Mapping[str, Any], module: Any) -> Any:
    """Return one of `rank_plans` as NeMo-RL's own value; `module` is its `dynamic_context_parallel`."""
    steps = tuple(
        module.CPRankStep(
            groups=tuple(
                module.CPRankGroup(
                    tuple(
                        module.CPAssignment(**{**task, "sample_indices": tuple(task["sample_indices"])})
                        for task in group["assignments"]
                    )
                )
                for group in step["groups"]
            ),
            valid_sequences=step["valid_sequences"],
            valid_tokens=step["valid_tokens"],
        )
        for step in document["steps"]
    )
    return module.CPRankPlan(lane=document["lane"], lane_ranks=tuple(document["lane_ranks"]), steps=steps)


def _padded(problem: Problem, multiple: int) -> Problem:
    return replace(
        problem,
        sync="microbatch",
        padding_multiple=multiple,
        tokens_per_rank=max(whole_budget(problem.tokens_per_rank, multiple), multiple),
    )


def _quickest(lengths: IntArray, problem: Problem, number: int) -> StepPlan:
    table = LengthTable(name="the batch", length_tokens=lengths)
    batch = batch_of(table, problem, step=number)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))
    solvers: list[Any] = [make_solver("megatron-dynamic-cp", batches)]
    if int(batch.work.tokens.max()) <= problem.tokens_per_rank:
        solvers.append(solver_of(problem, max_degree=1))
    planned = [assemble(solver.assign(batch), batch, problem) for solver in solvers]
    return min(planned, key=lambda step: step.makespan_seconds)


def _waves(step: StepPlan, lanes: int) -> Iterator[list[tuple[int, int, IntArray]]]:
    """Yield (first lane, lanes, samples) of each wave's tasks: wide ones first, each at a multiple of its width."""
    rows = list(step.microbatches())
    for wave in range(int(step.wave.max()) + 1):
        tasks = sorted((row for row in rows if row.wave == wave), key=lambda row: (-row.degree, row.order))
        first, found = 0, []
        for row in tasks:
            found.append((first, row.degree, np.asarray(row.sequences, dtype=np.int64)))
            first += row.degree
        assert first == lanes, f"wave {wave} has {counted(first, 'lane')}"
        yield found


def _task(
    task: tuple[int, int, IntArray], here: IntArray, lengths: IntArray, sequence_parallel: int, pad_multiple: int
) -> dict[str, Any]:
    first, width, samples = task
    unit = lcm(pad_multiple, (2 * width if width > 1 else 1) * sequence_parallel)
    of_batch = here[samples]
    # A lane without samples runs two tokens that count for nothing.
    tokens = lengths[of_batch] if len(of_batch) else np.array([2])
    return {
        "sample_indices": of_batch.tolist(),
        "lane_start": first,
        "cp_size": width,
        "pad_multiple": unit,
        "padded_tokens": int((-(-tokens // unit) * unit).sum()),
    }


def _has(task: Mapping[str, Any], lane: int) -> bool:
    return bool(task["lane_start"] <= lane < task["lane_start"] + task["cp_size"])
