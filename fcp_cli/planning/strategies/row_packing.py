"""`packing`: rows of --max-length tokens, dealt to the data-parallel ranks in turn, as in TRL and axolotl.

Both pack a data set into rows, best-fit decreasing (TRL, `packing_strategy="bfd"`) or first-fit decreasing (axolotl,
`sample_packing`), and give all ranks equally many rows, whatever their work. Here rows are best-fit decreasing, with
these differences:

- Sequences are packed within a global batch. Both frameworks pack across batches, and TRL truncates sequences that are
  longer than a row.
- A row has --max-length tokens, by default as many as a rank holds. If no rank holds the longest sequence, all rows run
  on rings of the smallest degree that does, as with axolotl's `context_parallel_size`.
"""

from __future__ import annotations

from functools import partial

from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import Draft, FunctionSolver, assignment_of, best_fit_decreasing, members_by_pack
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.planning.static import holding_degrees


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver with the smallest degree that holds the longest sequence."""
    problem = batches.problem
    longest, degree = batches.longest_tokens, holding_degrees(batches)[0]
    held = degree * problem.tokens_per_rank
    row_tokens = max(longest, min(batches.settings.max_length or held, held))
    options = {"degree": degree, "row_tokens": row_tokens}
    return FunctionSolver(
        name="packing", problem=problem, rule=partial(_packed, degree=degree, row_tokens=row_tokens), options=options
    )


def _packed(batch: Batch, problem: Problem, *, degree: int, row_tokens: int) -> Assignment:
    """Pack one batch into rows, and deal them to the groups in turn, in the order in which they were opened."""
    tokens = work_on(batch.work, degree, problem).tokens
    pack_of, degrees = best_fit_decreasing(tokens, max(row_tokens, int(tokens.max())))
    offsets, members = members_by_pack(pack_of, len(degrees))
    groups = problem.num_ranks // degree
    drafts = []
    for row in range(len(degrees)):
        first = row % groups * degree
        drafts.append(Draft(range(first, first + degree), members[offsets[row] : offsets[row + 1]].tolist()))
    return assignment_of(drafts, problem.sync)
