"""`flexsp`: flexible sequence parallelism by integer programming, from the description of FlexSP (ASPLOS 2025).

The batch is cut, in order of length, into M micro-batches of about equal tokens. M starts at the fewest that hold the
tokens, and a few more are tried. The sequences of a micro-batch are put into 16 buckets, and an integer program
(`solve`) opens groups of power-of-two degrees and fills them. The M with the smallest sum of makespans wins.
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
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from fcp_cli.cost.model import Work, group_seconds, joined
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import FunctionSolver, best_fit_decreasing, place_waves, quickest, require_power_of_two
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.util.arrays import FloatArray, IntArray

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


# FlexSP's integer program for one micro-batch (ASPLOS 2025): which groups to open, and how to fill them from buckets.
#
# Every sequence counts as the longest of its bucket. For each power of two d, N / d groups of d ranks may be opened;
# the program minimizes the time of the slowest group. It is solved by HiGHS through SciPy. One constraint is added to
# the description: groups of one degree are opened in order, which only removes symmetric answers.

Packs = list[tuple[int, list[int]]]  # degree and members of each group


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """Consecutive runs of sequences by rising length; every sequence counts as its bucket's longest.

    Attributes:
        members: positions in the batch, per bucket.
        tokens: [buckets] largest number of tokens.
        work: [buckets] largest work, field by field.
    """

    members: Sequence[IntArray]
    tokens: IntArray
    work: Work


def bucket(members: IntArray, batch: Batch, *, max_buckets: int) -> Buckets:
    """Return the buckets that add the fewest tokens if every sequence counts as its bucket's longest."""
    ascending = members[np.argsort(batch.work.tokens[members], kind="stable")]
    cuts = _bucket_cuts(batch.work.tokens[ascending], max_buckets)
    parts = np.split(ascending, cuts)
    most = joined([batch.work.take(part) for part in parts], lambda parts: np.array([part.max() for part in parts]))
    return Buckets(
        members=parts,
        tokens=np.array([batch.work.tokens[part].max() for part in parts]),
        work=most,
    )


def _bucket_cuts(ascending: IntArray, max_buckets: int) -> list[int]:
    """Return the start of each bucket except the first, by dynamic programming over the distinct lengths."""
    values, first = np.unique(ascending, return_index=True)
    end = np.append(first[1:], len(ascending))  # number of sequences up to and including each value
    tokens = np.concatenate(([0], np.cumsum(ascending)))
    if len(values) <= max_buckets:
        return [int(i) for i in first[1:]]
    # added[i, j]: tokens added by a single bucket for the values i..j
    added = (
        values[None, :] * (end[None, :] - first[:, None]) - (tokens[end][None, :] - tokens[first][:, None])
    ).astype(np.float64)
    added[np.tril_indices(len(values), -1)] = np.inf
    best, choices = added[0], []
    for _ in range(max_buckets - 1):
        extended = np.concatenate(([0.0], best[:-1]))[:, None] + added  # row i: the last bucket starts at value i
        choices.append(extended.argmin(axis=0))
        best = extended.min(axis=0)
    cuts, last = [], len(values) - 1
    for choice in reversed(choices):
        start = int(choice[last])
        if start == 0:
            break
        cuts.append(int(first[start]))
        last = start - 1
    return cuts[::-1]


def solve(buckets: Buckets, problem: Problem, *, degrees: Sequence[int], seconds_limit: float) -> Packs | None:
    """Return the groups of one micro-batch, or None if HiGHS finds none within the time limit.

    Args:
        buckets: the sequences.
        problem: ranks, token budget, cost profile.
        degrees: the degrees of groups that may be opened.
        seconds_limit: time limit of HiGHS; if it is reached, the answer depends on the machine's speed.
    """
    program = _Program(buckets, problem, degrees)
    result = milp(
        c=program.objective,
        constraints=program.constraints(),
        bounds=program.bounds(),
        integrality=program.integrality,
        options={"time_limit": seconds_limit},
    )
    return None if result.x is None else program.packs(result.x)


class _Program:
    """The integer program; its variables are counts[bucket, group] (row-major), opened[group] and the makespan."""

    def __init__(self, buckets: Buckets, problem: Problem, degrees: Sequence[int]) -> None:
        self.buckets, self.problem = buckets, problem
        self.degree = np.concatenate([np.full(problem.num_ranks // degree, degree) for degree in degrees])
        self.sizes = np.array([len(part) for part in buckets.members])
        # [buckets, 1], or with padding [buckets, groups]
        self.work = work_on(buckets.work.take(np.s_[:, None]), self.degree, problem)
        self.num_counts = len(self.sizes) * len(self.degree)
        self.num_variables = self.num_counts + len(self.degree) + 1
        self.objective = np.zeros(self.num_variables)
        self.objective[-1] = 1.0
        self.integrality = np.ones(self.num_variables)
        self.integrality[-1] = 0

    def bounds(self) -> Bounds:
        fits = self.buckets.tokens[:, None] <= self.degree[None, :] * self.problem.tokens_per_rank
        upper = np.concatenate([(fits * self.sizes[:, None]).ravel(), np.ones(len(self.degree)), [np.inf]])
        return Bounds(np.zeros(self.num_variables), upper)

    def constraints(self) -> list[LinearConstraint]:
        return [self._every_sequence_once(), self._enough_ranks(), self._memory(), *self._times(), self._in_order()]

    def _rows(self, counts: FloatArray, opened: FloatArray, makespan: float) -> csr_array:
        """Return a matrix with a row per group, whose coefficients are counts[:, group], opened[group] and makespan."""
        groups = np.arange(len(self.degree))
        rows = np.concatenate([np.tile(groups, len(self.sizes)), groups, groups])
        columns = np.concatenate(
            [np.arange(self.num_counts), self.num_counts + groups, np.full(len(groups), self.num_variables - 1)]
        )
        values = np.concatenate([counts.ravel(), opened, np.full(len(groups), makespan)])
        return csr_array((values, (rows, columns)), shape=(len(groups), self.num_variables))

    def _every_sequence_once(self) -> LinearConstraint:
        rows = np.repeat(np.arange(len(self.sizes)), len(self.degree))
        shape = (len(self.sizes), self.num_variables)
        matrix = csr_array((np.ones(self.num_counts), (rows, np.arange(self.num_counts))), shape=shape)
        return LinearConstraint(matrix, self.sizes, self.sizes)

    def _enough_ranks(self) -> LinearConstraint:
        row = np.zeros((1, self.num_variables))
        row[0, self.num_counts : -1] = self.degree
        return LinearConstraint(row, -np.inf, self.problem.num_ranks)

    def _memory(self) -> LinearConstraint:
        # In units of the budget: with tokens, the presolve of HiGHS has declared a worse answer optimal.
        share = np.broadcast_to(self.work.tokens / self.problem.tokens_per_rank, (len(self.sizes), len(self.degree)))
        held = self._rows(share, -self.degree.astype(np.float64), 0.0)
        return LinearConstraint(held, -np.inf, 0.0)

    def _times(self) -> list[LinearConstraint]:
        """Require makespan >= fixed + linear + attention + exposed ring, >= fixed + linear + ring, and >= host."""
        c, bandwidth = self.problem.profile.coefficients, self.problem.profile.bandwidth
        degree = self.degree[None, :].astype(np.float64)
        linear = self.work.unhidden_seconds / degree
        attention = self.work.attention_seconds / degree
        speed = np.where(degree > self.problem.ranks_per_node, bandwidth.inter_node, bandwidth.intra_node)
        ring = c.ring_bytes_per_token * self.work.tokens * (degree - 1.0) / degree / speed
        fixed = np.full(len(self.degree), c.microbatch_seconds)
        if self.work.windows is not None:  # at least two messages, one in each direction of the ring
            halos = c.halo_bytes_per_token * self.work.windows.halo_tokens * (degree - 1.0) / degree / speed
            linear, fixed = linear + halos, fixed + 2 * c.halo_message_seconds * (self.degree > 1)
        hops = c.ring_hop_seconds * (self.degree - 1.0)
        share = c.exposed_ring_share
        host = c.host_microbatch_seconds + c.host_hop_seconds * (self.degree - 1.0)
        return [
            *([LinearConstraint(self._rows(0.0 * linear, host, -1.0), -np.inf, 0.0)] if host.any() else []),
            LinearConstraint(self._rows(linear + attention + share * ring, fixed + share * hops, -1.0), -np.inf, 0.0),
            LinearConstraint(self._rows(linear + ring, fixed + hops, -1.0), -np.inf, 0.0),
        ]

    def _in_order(self) -> LinearConstraint:
        """Require opened[i] >= opened[i + 1] among groups of one degree."""
        same = np.flatnonzero(np.diff(self.degree) == 0)
        rows = np.arange(len(same))
        columns = self.num_counts + same
        values = np.concatenate([np.ones(len(same)), -np.ones(len(same))])
        places = (np.tile(rows, 2), np.concatenate([columns, columns + 1]))
        matrix = csr_array((values, places), shape=(len(same), self.num_variables))
        return LinearConstraint(matrix, 0.0, np.inf)

    def packs(self, x: FloatArray) -> Packs:
        """Return the groups of a solution; the sequences of each bucket are dealt by its counts."""
        counts = np.rint(x[: self.num_counts]).astype(np.int64).reshape(len(self.sizes), len(self.degree))
        members: list[list[int]] = [[] for _ in self.degree]
        for bucket_members, taken in zip(reversed(self.buckets.members), counts[::-1], strict=True):
            ends = np.cumsum(taken)
            for group in np.flatnonzero(taken).tolist():
                members[group] += bucket_members[ends[group] - taken[group] : ends[group]].tolist()
        return [(int(degree), pack) for degree, pack in zip(self.degree, members, strict=True) if pack]
