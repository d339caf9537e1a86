"""`wlb-llm`: packs of variable length but similar duration, on one degree, from WLB-LLM (OSDI 2025).

Written from the paper's description of variable-length packing, and from the code that DistCA's authors published as
their baseline of it. Sequences go, longest first, into the pack with the least work so far or, if that is full, into
the pack with the fewest tokens. Choices that the paper leaves open favour it:

- Work is in seconds of the cost profile. The original counts length + length^2 with the same ratio for all models.
- A pack holds the token budget of a group. If sequences fit into no pack, all groups run one more micro-batch; the
  baseline's code exceeds the budget instead.
- The degree (any divisor of the ranks) is the fastest over a sample of the plan's steps.
- Packs are dealt longest first: each to the group that is free first, or under `microbatch` in waves of similar packs.
- Global batches are not changed. The paper's queue, in which very long documents wait for later batches, changes which
  sequences are trained together.
- Every sequence is sharded evenly over its ring. The paper chooses between that and sharding the whole pack, by kernel
  efficiency; the cost model prices the former without a penalty for short sequences.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import Draft, FunctionSolver, assignment_of, quickest_solver
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.planning.static import holding_degrees
from fcp_cli.util.arrays import FloatArray, IntArray


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver with the fastest degree over a sample of the steps."""
    return quickest_solver((solver_of(batches.problem, degree) for degree in holding_degrees(batches)), batches)


def solver_of(problem: Problem, degree: int) -> FunctionSolver:
    """Make the solver for groups of one degree."""
    rule = partial(_shared_out, degree=degree)
    return FunctionSolver(name="wlb-llm", problem=problem, rule=rule, options={"degree": degree})


def _shared_out(batch: Batch, problem: Problem, *, degree: int) -> Assignment:
    """Pack one batch and deal its packs to the groups."""
    work = work_on(batch.work, degree, problem)
    groups, limit = problem.num_ranks // degree, degree * problem.tokens_per_rank
    packs = packs_of_groups(work.tokens, work.total_seconds, groups=groups, limit=limit)
    seconds = [float(work.total_seconds[pack].sum()) for pack in packs]
    busy = np.zeros(groups)
    drafts = []
    for turn, i in enumerate(sorted(range(len(packs)), key=lambda i: -seconds[i])):
        group = turn % groups if problem.sync == "microbatch" else int(busy.argmin())
        busy[group] += seconds[i]
        drafts.append(Draft(range(group * degree, (group + 1) * degree), packs[i]))
    return assignment_of(drafts, problem.sync)


def packs_of_groups(tokens: IntArray, work: FloatArray, *, groups: int, limit: int) -> list[list[int]]:
    """Pack into the fewest micro-batches per group that hold all sequences; see `balanced_packs`. Drop empty packs."""
    turns = max(1, -(-int(tokens.sum()) // (groups * limit)))
    while True:
        packs, left = balanced_packs(tokens, work, number=groups * turns, limit=limit)
        if not left:
            return [pack for pack in packs if pack]
        turns += 1


def balanced_packs(tokens: IntArray, work: FloatArray, *, number: int, limit: int) -> tuple[list[list[int]], list[int]]:
    """Pack sequences, longest first, into the pack with the least work or, if that is full, the fewest tokens.

    Args:
        tokens: [n] tokens.
        work: [n] work, in any unit.
        number: number of packs.
        limit: token budget of a pack.

    Returns:
        The sequences of each pack, and those for which there was no room.
    """
    packs: list[list[int]] = [[] for _ in range(number)]
    left: list[int] = []
    pack_work, pack_tokens = np.zeros(number), np.zeros(number, dtype=np.int64)
    for sequence in np.argsort(-tokens, kind="stable").tolist():
        lightest = int(pack_work.argmin())
        pack = lightest if pack_tokens[lightest] + tokens[sequence] <= limit else int(pack_tokens.argmin())
        if pack_tokens[pack] + tokens[sequence] > limit:
            left.append(sequence)
            continue
        packs[pack].append(sequence)
        pack_work[pack] += work[sequence]
        pack_tokens[pack] += tokens[sequence]
    return packs, left
