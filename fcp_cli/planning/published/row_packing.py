"""`packing`: rows of --max-length tokens, dealt to the data-parallel ranks in turn, as TRL and axolotl fine-tune.

Both pack a data set into rows, best-fit decreasing (TRL, `packing_strategy="bfd"`) or first-fit decreasing (axolotl,
`sample_packing`), and give every rank as many rows, regardless of their work. Choices that the frameworks leave open
favour them:

- Packed within a global batch, which both would change; TRL cuts sequences that are longer than a row.
- A row has --max-length tokens, by default as many as a rank holds. If no rank holds the longest sequence, all rows run
  on rings of the smallest degree that does, as with axolotl's `context_parallel_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fcp_cli.planning.baselines.drafts import Draft, assign
from fcp_cli.planning.baselines.packing import best_fit_decreasing, members_by_pack
from fcp_cli.planning.baselines.static import static_degrees
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import work_on


def make_solver(batches: GlobalBatches) -> RowPacking:
    """Make the solver with the smallest degree whose ranks hold the longest sequence (all ranks do)."""
    problem = batches.problem
    longest = batches.longest_tokens
    degree = next(one for one in static_degrees(problem) if one * problem.tokens_per_rank >= longest)
    held = degree * problem.tokens_per_rank
    return RowPacking(problem, degree, max(longest, min(batches.settings.max_length or held, held)))


class RowPacking:
    """Packs rows and deals them out in the order in which they were opened."""

    name = "packing"

    def __init__(self, problem: Problem, degree: int, row_tokens: int) -> None:
        self._problem = problem
        self._degree = degree
        self._row_tokens = row_tokens
        self.options: Mapping[str, Any] = {"degree": degree, "row_tokens": row_tokens}

    def assign(self, batch: Batch) -> Assignment:
        """Pack one batch, and deal its rows to the groups."""
        tokens = work_on(batch.work, self._degree, self._problem).tokens
        pack_of, degrees = best_fit_decreasing(tokens, max(self._row_tokens, int(tokens.max())))
        offsets, members = members_by_pack(pack_of, len(degrees))
        groups = self._problem.num_ranks // self._degree
        drafts = []
        for row in range(len(degrees)):
            first = row % groups * self._degree
            drafts.append(Draft(range(first, first + self._degree), members[offsets[row] : offsets[row + 1]].tolist()))
        return assign(drafts, self._problem.sync)
