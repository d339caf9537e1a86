"""`distca`: attention as tasks on any ranks, apart from the rest of the layers, from DistCA (arXiv 2510.18121).

Core attention disaggregation runs a layer in two parts. All ranks hold equally many tokens, sequences cut where a rank
is full; attention is cut into tasks, queries of a sequence with all keys before them, which any rank may run. Queries,
keys and values travel to the rank of the task, outputs travel back, and two halves of a micro-batch take turns, so that
messages of one hide behind the other's computation. No plan of rings can run this, so `fcp compare` alone prices it.

Tasks are chosen by the planner of the published code (hao-ai-lab/DistCA): ranks with the least attention first, each
takes from ranks with too much the tasks that move the fewest bytes a second of attention, until it lacks less than
`tolerance` of the mean. Where a choice was left, the kinder one was made:

- Weights are seconds of the cost profile. A moved task is charged the keys of its sequence that its rank does not hold.
- A micro-batch takes its ranks the sum of both parts; ranks wait for each other once in it, not at each layer.
- Messages take as long as their bytes at the ring's bandwidth, both ways at once; each has no latency. All that the
  rank's computation is long enough for is hidden.
- A moved task costs what a further hop of a ring costs on its queries (`chunk_seconds_per_token`): a kernel more, and
  the sum of partial results.
- Memory is that of the tokens a rank holds: keys and values of tasks that it runs for others are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.profile import Heads
from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.bounds import area_bound_seconds
from fcp_cli.planning.problem import Batch, PricedStep, Problem

_TOLERANCE: Final = 0.1  # the published planner's default
_ROUNDING: Final = 1e-9  # of the mean attention of a rank: less than this is no task


def make_solver(batches: GlobalBatches) -> DistCA:
    """Make the strategy.

    Raises:
        UsageError: the profile does not say how many bytes queries and keys have, or ranks run stages.
    """
    problem = batches.problem
    if problem.profile.heads is None:
        raise UsageError("distca needs a cost profile with the block heads; 'fcp profile --analytic' has it")
    if problem.pipeline is not None or problem.rank_speeds is not None:
        raise UsageError("distca is priced for ranks of one speed without pipeline stages")
    return DistCA(problem, problem.profile.heads)


@dataclass(slots=True)
class Tasks:
    """Attention of one micro-batch: each task is some queries of one sequence, on one rank.

    Attributes:
        sequence: [tasks] index into the batch.
        tokens: [tasks] queries, pairs of a head and a tail of the sequence, so that each takes as long.
        home: [tasks] rank that holds the queries.
        rank: [tasks] rank that runs the task.
    """

    sequence: IntArray
    tokens: FloatArray
    home: IntArray
    rank: IntArray

    def hand_over(self, task: int, rank: int, *, share: float) -> None:
        """Let another rank run a share of a task."""
        if share >= 1.0:
            self.rank[task] = rank
            return
        taken = self.tokens[task] * share
        self.tokens[task] -= taken
        self.sequence = np.append(self.sequence, self.sequence[task])
        self.tokens = np.append(self.tokens, taken)
        self.home = np.append(self.home, self.home[task])
        self.rank = np.append(self.rank, rank)


class DistCA:
    """Prices every batch: passes of equal tokens, tasks moved until ranks have about as much attention."""

    name = "distca"
    options: Mapping[str, Any] = {"tolerance": _TOLERANCE}

    def __init__(self, problem: Problem, heads: Heads) -> None:
        self._problem, self._heads = problem, heads

    def price(self, batch: Batch) -> PricedStep:
        """Predict the seconds of one step."""
        problem, step = self._problem, self._problem.profile.step
        closing, floor = step.closing_seconds(problem.sync), step.floor_seconds(problem.sync)
        seconds, busy = closing, closing * problem.num_ranks
        for members in self._passes(batch):
            of_rank = self._rank_seconds(members, batch)
            seconds += max(floor, float(of_rank.max()))
            busy += float(of_rank.sum())
        bound = area_bound_seconds(batch.work, problem) + closing
        return PricedStep(seconds=seconds, bound_seconds=bound, busy_rank_seconds=busy)

    def _passes(self, batch: Batch) -> list[list[int]]:
        """Cut a batch into as few micro-batches of all ranks as hold its tokens, longest sequences first."""
        tokens, room = batch.work.tokens, self._problem.num_ranks * self._problem.tokens_per_rank
        number = -(-int(tokens.sum()) // room)
        while True:
            passes: list[list[int]] = [[] for _ in range(number)]
            held = np.zeros(number, dtype=np.int64)
            for sequence in np.argsort(-tokens, kind="stable").tolist():
                emptiest = int(held.argmin())
                passes[emptiest].append(sequence)
                held[emptiest] += tokens[sequence]
            if held.max() <= room:
                return passes
            number += 1

    def _rank_seconds(self, members: list[int], batch: Batch) -> FloatArray:
        """Return [ranks] the seconds of one micro-batch."""
        profile, ranks = self._problem.profile, self._problem.num_ranks
        work = batch.work.take(np.array(members))
        attention = work.attention_seconds if work.windows is None else work.attention_seconds + work.windows.seconds
        per_token = attention / work.tokens
        tasks = laid_out(work.tokens, ranks)
        held = np.zeros((len(members), ranks))
        np.add.at(held, (tasks.sequence, tasks.home), tasks.tokens)
        rebalanced(tasks, per_token, work.tokens, self._heads, ranks)
        moved = np.where(tasks.rank == tasks.home, 0.0, tasks.tokens)
        linear = held.T @ (work.linear_seconds / work.tokens)
        computed = linear + np.bincount(tasks.rank, tasks.tokens * per_token[tasks.sequence], ranks)
        computed += profile.coefficients.chunk_seconds_per_token * np.bincount(tasks.rank, moved, ranks)
        hidden = np.maximum(0.0, self._message_seconds(tasks, held) - computed)
        return np.asarray(profile.coefficients.microbatch_seconds + computed + hidden)

    def _message_seconds(self, tasks: Tasks, held: FloatArray) -> FloatArray:
        """Return [ranks] the seconds of all messages to a rank, as many of which go the other way at once."""
        ranks, size = held.shape[1], self._problem.ranks_per_node
        bandwidth = self._problem.profile.bandwidth
        seconds = np.zeros(ranks)
        keys, queries = self._heads.key_value_exchange_bytes_per_token / 2, self._heads.exchange_bytes_per_token / 2
        for rank in range(ranks):
            mine = tasks.rank == rank
            first = rank // size * size
            there = held[np.unique(tasks.sequence[mine])].sum(axis=0)
            near = float(there[first : first + size].sum() - there[rank])
            far = float(there.sum()) - near - float(there[rank])
            away = mine & (tasks.home != rank)
            inside = away & (tasks.home // size == rank // size)
            asked = float(tasks.tokens[inside].sum()), float(tasks.tokens[away & ~inside].sum())
            seconds[rank] += (keys * near + queries * asked[0]) / bandwidth.intra_node
            seconds[rank] += (keys * far + queries * asked[1]) / bandwidth.inter_node
        return seconds


def laid_out(tokens: IntArray, ranks: int) -> Tasks:
    """Give all ranks equally many tokens, sequence by sequence; what is cut is a task on each of its ranks."""
    ends = np.cumsum(tokens, dtype=np.float64)
    cuts = np.union1d(ends, ends[-1] * np.arange(1, ranks + 1) / ranks)
    sizes = np.diff(cuts, prepend=0.0)
    middle = cuts - sizes / 2
    home = np.minimum((middle * ranks / ends[-1]).astype(np.int64), ranks - 1)
    kept = sizes > 1e-6  # where a cut and an end meet but for rounding
    sequence = np.searchsorted(ends, middle)
    return Tasks(sequence=sequence[kept], tokens=sizes[kept], home=home[kept], rank=home[kept].copy())


def rebalanced(tasks: Tasks, per_token: FloatArray, lengths: IntArray, heads: Heads, ranks: int) -> None:
    """Move tasks, or parts of them, in place, to ranks that have too little attention.

    Args:
        tasks: of a micro-batch.
        per_token: [sequences] seconds of attention of one query.
        lengths: [sequences] in tokens.
        heads: bytes of queries and keys.
        ranks: of the job.
    """
    load = np.bincount(tasks.rank, tasks.tokens * per_token[tasks.sequence], ranks)
    mean = float(load.mean())
    surplus = load - mean
    for rank in np.argsort(surplus, kind="stable").tolist():
        while -surplus[rank] > _TOLERANCE * mean:
            seconds = tasks.tokens * per_token[tasks.sequence]
            most = np.minimum(np.minimum(seconds, -surplus[rank]), surplus[tasks.rank])
            able = np.flatnonzero(most > _ROUNDING * mean)
            if not len(able):
                break
            of = tasks.sequence[able]
            queries = most[able] / per_token[of] * heads.exchange_bytes_per_token
            moved_bytes = queries + lengths[of] * heads.key_value_exchange_bytes_per_token
            best = int(able[np.argmin(moved_bytes / most[able])])
            surplus[tasks.rank[best]] -= most[best]
            surplus[rank] += most[best]
            tasks.hand_over(best, rank, share=float(most[best] / seconds[best]))
