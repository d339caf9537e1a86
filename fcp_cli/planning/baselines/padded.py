"""`padded`: a loader's batches, each padded to its longest sequence and dealt to data-parallel ranks in turn.

It is how scripts train by default (transformers' Trainer, PyTorch's DataLoader), and so a baseline that `fcp compare`
prices; plans pad nothing. Choices that loaders leave open favour them:

- Rows a batch: the power of two that takes least over the plan, of those of which a rank holds a batch of the longest.
- If no rank holds the longest sequence, all batches run on rings of the smallest degree that does.
- Sequences are in the order of the global batch, which is as random as the loader's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.pricing.padding import padded_tokens
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.drafts import Draft, assignment_of, quickest_solver
from fcp_cli.planning.baselines.static import TUNING_STEPS, holding_degrees
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import batch_work


def make_solver(batches: GlobalBatches) -> Padded:
    """Make the solver with the smallest degree whose ranks hold the longest sequence, and the quickest rows a batch."""
    problem, table = batches.problem, batches.table
    longest, degree = batches.longest_tokens, holding_degrees(batches)[0]
    held = padded_tokens(longest, degree, problem.padding_multiple)
    sizes = int(degree * problem.tokens_per_rank // held).bit_length()
    solvers = [Padded(problem, table, degree=degree, rows_per_pass=2**power) for power in range(sizes)]
    return quickest_solver(solvers, batches, steps=TUNING_STEPS)


class Padded:
    """Cuts global batches into runs of `rows_per_pass` sequences, the last one maybe shorter."""

    name = "padded"

    def __init__(self, problem: Problem, table: LengthTable, *, degree: int, rows_per_pass: int) -> None:
        self._problem, self._table = problem, table
        self._degree, self._rows = degree, rows_per_pass
        self.options: Mapping[str, Any] = {"degree": degree, "rows_per_pass": rows_per_pass}

    def assign(self, batch: Batch) -> Assignment:
        """Deal the batches of one step to the groups in turn."""
        groups = self._problem.num_ranks // self._degree
        drafts = []
        for turn, start in enumerate(range(0, len(batch.rows), self._rows)):
            first = turn % groups * self._degree
            members = range(start, min(start + self._rows, len(batch.rows)))
            drafts.append(Draft(range(first, first + self._degree), [*members]))
        return assignment_of(drafts, self._problem.sync)

    def padded(self, batch: Batch) -> Batch:
        """Return the batch as it runs: each sequence as long as the longest of its run."""
        sequences = self._table.take(batch.rows)
        lengths = _padded_to_longest(sequences.length_tokens, self._rows)
        work = batch_work(replace(sequences, length_tokens=lengths), self._problem)
        return replace(batch, lengths=lengths.astype(np.int32), work=work)

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of the step for any assignment."""
        return makespan_seconds(self.assign(batch), self.padded(batch), self._problem)


def _padded_to_longest(lengths: IntArray, rows: int) -> IntArray:
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), rows))
    return np.repeat(longest, rows)[: len(lengths)]
