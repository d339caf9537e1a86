"""`padded`: the batches of a data loader, padded to their longest sequence and dealt to data-parallel ranks in turn.

Scripts train so by default (transformers' Trainer, PyTorch's DataLoader), so `fcp compare` prices it as a baseline.
Plans of fcp do not pad. Choices that loaders leave open favour them:

- Batch size: the fastest power of two of which a rank can hold a batch of the longest sequence.
- If no rank holds the longest sequence, all batches run on rings of the smallest degree that does.
- Sequences keep the order of the global batch, which is as random as the loader's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.setup import padded_tokens
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of
from fcp_cli.planning.drafts import Draft, assignment_of, quickest_solver
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.static import TUNING_STEPS, holding_degrees


def make_solver(batches: GlobalBatches) -> Padded:
    """Make the solver with the smallest degree that holds the longest sequence, and the fastest batch size."""
    problem, table = batches.problem, batches.table
    longest, degree = batches.longest_tokens, holding_degrees(batches)[0]
    held = padded_tokens(longest, degree, problem.padding_multiple)
    sizes = int(degree * problem.tokens_per_rank // held).bit_length()
    solvers = [Padded(problem, table, degree=degree, rows_per_pass=2**power) for power in range(sizes)]
    return quickest_solver(solvers, batches, steps=TUNING_STEPS)


class Padded:
    """Solver that cuts a global batch into runs of `rows_per_pass` sequences; the last may be shorter.

    Its steps must be priced by `seconds`, since a plan knows no padding to the longest sequence.
    """

    name = "padded"

    def __init__(self, problem: Problem, table: LengthTable, *, degree: int, rows_per_pass: int) -> None:
        self._problem, self._table = problem, table
        self._degree, self._rows = degree, rows_per_pass
        self.options: Mapping[str, Any] = {"degree": degree, "rows_per_pass": rows_per_pass}

    def assign(self, batch: Batch) -> Assignment:
        """Deal the runs of one step to the groups in turn."""
        groups = self._problem.num_ranks // self._degree
        drafts = []
        for turn, start in enumerate(range(0, len(batch.rows), self._rows)):
            first = turn % groups * self._degree
            members = range(start, min(start + self._rows, len(batch.rows)))
            drafts.append(Draft(range(first, first + self._degree), [*members]))
        return assignment_of(drafts, self._problem.sync)

    def padded(self, batch: Batch) -> Batch:
        """Return the batch with each sequence padded to the longest of its run."""
        sequences = self._table.take(batch.rows)
        own = sequences.length_tokens
        lengths = np.repeat(np.maximum.reduceat(own, np.arange(0, len(own), self._rows)), self._rows)[: len(own)]
        work = batch_of(replace(sequences, length_tokens=lengths), self._problem).work
        return replace(batch, lengths=lengths.astype(np.int32), work=work)

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of the step, with padding."""
        return makespan_seconds(self.assign(batch), self.padded(batch), self._problem)
