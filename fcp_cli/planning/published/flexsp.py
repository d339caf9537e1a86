"""`flexsp`: flexible sequence parallelism by integer programming, from the description of FlexSP (ASPLOS 2025).

The batch is cut, in order of length, into M micro-batches of about equal tokens. M starts at the fewest that hold the
tokens, and a few more are tried. The sequences of a micro-batch are put into 16 buckets, and an integer program
(`flexsp_milp`) opens groups of power-of-two degrees and fills them. The M with the smallest sum of makespans wins.
Choices that the paper leaves open:

- HiGHS through SciPy instead of SCIP, with the same 5 s per program. At the time limit the answer depends on the
  machine's speed, unlike for all other strategies here.
- Every micro-batch is solved with degrees from 2 on (as in the published code), from 4 on and, with up to 16 ranks,
  from 1 on; the fastest answer counts. With more ranks, degree 1 only slows HiGHS down.
- Time is priced by the cost profile, including rings (the original runs all-to-all).
- A greedy answer counts if it is faster or the programs find none: best-fit-decreasing packs on the smallest powers of
  two, then doubling the slowest while ranks are free.
- Groups are placed like those of other strategies: inside a node if they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.cost.model import group_seconds
from fcp_cli.planning.baselines.drafts import FunctionSolver, place_waves, quickest, require_power_of_two
from fcp_cli.planning.baselines.packing import best_fit_decreasing
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.published.flexsp_milp import Packs, bucket, solve
from fcp_cli.planning.work import work_on

_BUCKETS = 16
_FEW_RANKS = 16
MILP_SECONDS = 5.0
TRIALS = 3  # numbers of micro-batches tried


def make_solver(batches: GlobalBatches, *, milp_seconds: float = MILP_SECONDS, trials: int = TRIALS) -> FunctionSolver:
    """Make the solver; `milp_seconds` is the time limit of each integer program."""
    return FunctionSolver(
        name="flexsp",
        problem=batches.problem,
        rule=partial(_planned, milp_seconds=milp_seconds, trials=trials),
        options={"milp_seconds": milp_seconds, "trials": trials, "buckets": _BUCKETS},
    )


def _planned(batch: Batch, problem: Problem, *, milp_seconds: float, trials: int) -> Assignment:
    """Solve one batch, in up to `milp_seconds` per micro-batch, trial and menu of degrees.

    Raises:
        PlanError: a sequence needs more ranks than the largest power of two up to `num_ranks`.
    """
    require_power_of_two("flexsp", int(batch.lengths.max()), problem)
    candidates: list[Assignment] = []
    fewest = -(-int(batch.work.tokens.sum()) // (problem.num_ranks * problem.tokens_per_rank))
    count = fewest
    while count < fewest + trials or not candidates:
        waves = [_microbatch(part, batch, problem, milp_seconds) for part in chunk_by_tokens(batch.work.tokens, count)]
        if None not in waves:
            candidates.append(place_waves([wave for wave in waves if wave is not None], problem))
        count += 1
    return quickest(candidates, batch, problem)


def _microbatch(members: IntArray, batch: Batch, problem: Problem, milp_seconds: float) -> Packs | None:
    greedy = greedy_packs(members.tolist(), batch, problem)
    if greedy is None:
        return None  # the program would usually fail, too: try more micro-batches
    buckets = bucket(members, batch, max_buckets=_BUCKETS)
    answers = [greedy]
    for menu in menus(problem.num_ranks):
        solved = solve(buckets, problem, degrees=menu, seconds_limit=milp_seconds)
        answers += [solved] if solved else []
    return min(answers, key=lambda packs: max(pack_seconds(pack, batch, problem) for pack in packs))


def menus(num_ranks: int) -> list[list[int]]:
    """Return the degrees of each integer program: powers of two from 4 on, from 2 on and, with few ranks, from 1 on."""
    powers = [1 << shift for shift in range(num_ranks.bit_length())]
    skips = (0, 1, 2) if num_ranks <= _FEW_RANKS else (1, 2)
    return [powers[skip:] for skip in skips if powers[skip:]]


def chunk_by_tokens(tokens: IntArray, count: int) -> list[IntArray]:
    """Cut the sequences, longest first, into `count` runs (or one each) with the fewest tokens in the largest run."""
    order = np.argsort(-tokens, kind="stable")
    running = np.cumsum(tokens[order])

    def cuts(limit: int) -> list[int]:
        ends: list[int] = []
        while not ends or ends[-1] < len(order):
            before = int(running[ends[-1] - 1]) if ends else 0
            ends.append(int(np.searchsorted(running, before + limit, side="right")))
        return ends

    low, high = int(tokens.max()), int(running[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cuts(middle)) <= count else (middle + 1, high)
    chunks = np.split(order, cuts(low)[:-1])
    while len(chunks) < min(count, len(order)):
        # Fewer runs suffice for the tokens, but power-of-two degrees may need the requested number.
        fullest = max((i for i, chunk in enumerate(chunks) if len(chunk) > 1), key=lambda i: tokens[chunks[i]].sum())
        chunks[fullest : fullest + 1] = np.array_split(chunks[fullest], 2)
    return chunks


def greedy_packs(members: Sequence[int], batch: Batch, problem: Problem) -> Packs | None:
    """Pack greedily for power-of-two degrees; return None if there are too few ranks."""
    pack_of, degrees = best_fit_decreasing(
        batch.work.tokens[members], problem.tokens_per_rank, padding_multiple=problem.padding_multiple
    )
    packs: Packs = [(1 << (degree - 1).bit_length(), []) for degree in degrees.tolist()]
    for member, pack_number in zip(members, pack_of.tolist(), strict=True):
        packs[pack_number][1].append(member)
    free = problem.num_ranks - sum(degree for degree, _ in packs)
    if free < 0:
        return None
    seconds = [pack_seconds(pack, batch, problem) for pack in packs]
    while True:
        slowest = max(range(len(packs)), key=seconds.__getitem__)
        degree, pack = packs[slowest]
        if degree > free:
            return packs
        doubled = pack_seconds((2 * degree, pack), batch, problem)
        if doubled >= seconds[slowest]:
            return packs
        packs[slowest], seconds[slowest] = (2 * degree, pack), doubled
        free -= degree


def pack_seconds(pack: tuple[int, list[int]], batch: Batch, problem: Problem) -> float:
    """Predict the seconds of a pack (degree, members) at the best placement."""
    degree, members = pack
    work = work_on(batch.work.take(np.array(members)), degree, problem)
    return float(
        group_seconds(
            problem.profile,
            work.packed(np.zeros(1, dtype=np.int64)),
            degree=degree,
            crosses_nodes=degree > problem.ranks_per_node,
        )[0]
    )
