"""Predicted seconds of a script's own batches, padded or packed, for comparison with the plan of its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.plan.metadata.job_facts import JobFacts
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.drafts import Draft, assignment_of
from fcp_cli.planning.baselines.packing import best_fit_decreasing, members_by_pack
from fcp_cli.planning.baselines.padded import Padded
from fcp_cli.planning.batching.batches import GlobalBatches, batch_of, spread_steps
from fcp_cli.words import duration

_AS_GOOD: Final = 0.02  # relative difference below which predictions are called equal
_PACKED_ROWS: Final = 8192  # largest sample of the training data that is packed
_PACKED_STEPS: Final = 16  # largest number of packed steps that are priced


def comparison(job: JobFacts, batches: GlobalBatches, planned: float, steps: Sequence[int]) -> str:
    """Return a clause of a message that compares the planned seconds of a step with the script's own.

    Args:
        job: facts of the script's loop; for `DPOTrainer` the clause is empty.
        batches: the batches of the plan.
        planned: mean predicted seconds of `steps` under the plan.
        steps: the steps to compare.
    """
    if job.loop == "DPOTrainer":
        return ""
    advice = ""
    if job.packs_to is None:
        own = padded_seconds(batches, job, steps)
        of_script = f"the script's own padded batches ({duration(own)})"
    else:
        own, sequences = packed_step(batches, job)
        own *= job.global_batch_size / sequences
        of_script = f"the script's own packing ({duration(own)} for as many sequences)"
        rows = round(sequences * job.rows_per_pass / job.global_batch_size)
        if rows > job.rows_per_pass:
            advice = (
                f"; its steps had {sequences:,.0f} sequences: turn packing off and give batches of {rows} rows a rank "
                "for as many"
            )
    if planned < own * (1 - _AS_GOOD):
        return f", {1 - planned / own:.0%} less than {of_script}{advice}"
    if planned <= own * (1 + _AS_GOOD):
        return f", as long as {of_script}{advice or ': a plan gains nothing here'}"
    return f", {planned / own - 1:.0%} more than {of_script}{advice or ': start the script without fcp'}"


def padded_seconds(batches: GlobalBatches, job: JobFacts, steps: Sequence[int]) -> float:
    """Return the mean seconds of the steps without a plan: data parallel, batches padded to their longest sequence.

    Rows are in the plan's order, which is as random as the script's. Batches are priced even if they do not fit.
    """
    loader = Padded(batches.problem, batches.table, degree=1, rows_per_pass=job.rows_per_pass)
    return float(np.mean([loader.seconds(batches.batch(step)) for step in steps]))


def packed_step(batches: GlobalBatches, job: JobFacts) -> tuple[float, float]:
    """Return the mean seconds and the mean number of sequences of an optimizer step of a script that packs.

    Sequences are packed best-fit decreasing into rows, and rows are drawn at random, `global_batch_size` per step. Only
    whole steps are priced, unless the data has none. Rows are priced even if they do not fit.
    """
    rows = np.random.default_rng(0).permutation(batches.rows)[:_PACKED_ROWS]
    table = batches.table.take(rows)
    pack_of, _ = best_fit_decreasing(table.length_tokens, max(job.packs_to or 0, int(table.length_tokens.max())))
    offsets, members = members_by_pack(pack_of, int(pack_of.max()) + 1)
    packs = np.random.default_rng(0).permutation(len(offsets) - 1)
    whole = max(1, len(packs) // job.global_batch_size)
    found = []
    for step in spread_steps(whole, _PACKED_STEPS):
        own = packs[step * job.global_batch_size :][: job.global_batch_size]
        found.append(_priced(batches, job, [rows[members[offsets[pack] : offsets[pack + 1]]] for pack in own]))
    seconds, sequences = np.mean(found, axis=0)
    return float(seconds), float(sequences)


def _priced(batches: GlobalBatches, job: JobFacts, packs: Sequence[IntArray]) -> tuple[float, int]:
    """Return the seconds and the number of sequences of an optimizer step on these packs of manifest rows."""
    problem = batches.problem
    batch = batch_of(batches.table.take(np.concatenate(packs)), problem)
    ends = np.cumsum([0, *map(len, packs)])
    drafts = []
    for turn, first in enumerate(range(0, len(packs), job.rows_per_pass)):
        last = min(first + job.rows_per_pass, len(packs))
        drafts.append(Draft([turn % problem.num_ranks], range(ends[first], ends[last])))
    return makespan_seconds(assignment_of(drafts, problem.sync), batch, problem), len(batch.rows)
