"""Prices of steps whose attention may run on other ranks than its tokens: in tasks, blocks or chunks within a group.

A plan of rings cannot express these executions, so only `fcp compare` prices them. All are priced by the cost profile
on the same devices and links, with these assumptions, which favour the strategy:

- Ranks of a group wait for each other once per micro-batch, not in every layer.
- Messages travel at the ring's bandwidth in both directions at once, and take `ring_hop_seconds` per sending rank. They
  hide behind attention or, if two halves of a micro-batch alternate ("ping-pong"), behind all computation.
- The backward fetches keys and values again and returns their gradients. With ping-pong they are kept from the forward,
  and their memory is not counted.
- A further kernel on some queries costs as much as a further hop of a ring (`chunk_seconds_per_token`).

The lower bound is all work shared evenly, plus the fixed seconds of the micro-batches that its tokens need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import Heads
from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.bounds import area_bound_seconds
from fcp_cli.planning.drafts import quickest_solver
from fcp_cli.planning.problem import Batch, PricedStep, Problem
from fcp_cli.planning.static import holding_degrees
from fcp_cli.planning.strategies.wlb_llm import packs_of_groups
from fcp_cli.util.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadAttention:
    """Strategy that prices a batch as micro-batches on groups of one degree.

    Attributes:
        name: the name in the registry.
        problem: the problem to price.
        heads: bytes of queries and keys.
        degree: ranks of a group.
        rank_seconds: returns [degree] the seconds of a micro-batch on each rank of a group.
        options: settings, for the output of `fcp compare`.
    """

    name: str
    problem: Problem
    heads: Heads
    degree: int
    rank_seconds: Callable[[SpreadAttention, Work], FloatArray]
    options: Mapping[str, Any]

    def price(self, batch: Batch) -> PricedStep:
        """Predict one step; see `PricedStep`."""
        problem, step = self.problem, self.problem.profile.step
        closing, floor = step.closing_seconds(problem.sync), step.floor_seconds(problem.sync)
        packs, c = self._packs(batch.work), problem.profile.coefficients
        # Its hosts issue at least the operations of fcp's, and a message to each other rank of the group.
        host = c.host_microbatch_seconds + c.host_hop_seconds * (self.degree - 1)
        of_ranks = [np.maximum(self.rank_seconds(self, batch.work.take(np.array(pack))), host) for pack in packs]
        of_packs = sorted((float(ranks.max()) for ranks in of_ranks), reverse=True)
        groups = problem.num_ranks // self.degree
        if problem.sync == "microbatch":
            seconds = sum(max(floor, longest) for longest in of_packs[::groups])
        else:
            ends = np.zeros(groups)
            for pack in of_packs:
                ends[ends.argmin()] += pack
            seconds = float(ends.max())
        busy = closing * problem.num_ranks + float(sum(ranks.sum() for ranks in of_ranks))
        bound = area_bound_seconds(batch.work, problem) + closing
        return PricedStep(seconds=seconds + closing, bound_seconds=bound, busy_rank_seconds=busy)

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of one step."""
        return self.price(batch).seconds

    def _packs(self, work: Work) -> list[list[int]]:
        """Pack a batch into the fewest micro-batches per group that hold it: by tokens for one group, else by work."""
        groups, limit = self.problem.num_ranks // self.degree, self.degree * self.problem.tokens_per_rank
        weights = work.tokens.astype(np.float64) if groups == 1 else work.total_seconds
        return packs_of_groups(work.tokens, weights, groups=groups, limit=limit)

    def task_seconds(self, tasks: Tasks, work: Work, kernels: FloatArray, *, ping_pong: bool) -> FloatArray:
        """Return [degree] the seconds on each rank of a micro-batch of tasks, each with all keys of its sequence.

        Args:
            tasks: attention tasks, with the rank that runs each and the rank that holds its queries.
            work: [sequences] work of the micro-batch.
            kernels: [tasks] number of kernels beyond the first.
            ping_pong: whether messages hide behind all computation, and fetched keys are kept.
        """
        ranks, count, c = self.degree, len(work.tokens), self.problem.profile.coefficients
        held = np.zeros((count, ranks))
        np.add.at(held, (tasks.sequence, tasks.home), tasks.tokens)
        runs = np.zeros((ranks, count))
        runs[tasks.rank, tasks.sequence] = 1.0
        asked = np.zeros((ranks, ranks))
        np.add.at(asked, (tasks.rank, tasks.home), tasks.tokens)
        linear = held.T @ (work.linear_seconds / work.tokens)
        each = attention_per_token(work)[tasks.sequence] + c.chunk_seconds_per_token * kernels
        attention = np.bincount(tasks.rank, tasks.tokens * each, ranks)
        messages = self.message_seconds(runs @ held, asked, kept=ping_pong)
        if ping_pong:
            return np.asarray(c.microbatch_seconds + np.maximum(linear + attention, messages))
        return np.asarray(c.microbatch_seconds + linear + np.maximum(attention, messages))

    def message_seconds(self, keys: FloatArray, queries: FloatArray | None = None, *, kept: bool) -> FloatArray:
        """Return [degree] the seconds of all messages that a rank receives; it sends others at the same time.

        Args:
            keys: [to, from] tokens whose keys and values travel.
            queries: [to, from] tokens whose queries travel and whose outputs return, or None.
            kept: whether fetched keys are kept for the backward. If not, two thirds of a ring's bytes go to the
                fetching rank, in forward and backward, and one third, the gradients, comes from it.
        """
        if kept:
            moved = self.heads.key_value_exchange_bytes_per_token * keys / 2
        else:
            moved = self.problem.profile.coefficients.ring_bytes_per_token * (2 * keys + keys.T) / 3
        if queries is not None:
            moved += self.heads.exchange_bytes_per_token * (queries if kept else (queries + queries.T) / 2) / 2
        node = np.arange(self.degree) // self.problem.ranks_per_node
        near = node[:, None] == node[None, :]
        bandwidth = self.problem.profile.bandwidth
        seconds = np.where(near, moved / bandwidth.intra_node, moved / bandwidth.inter_node)
        seconds[moved > 0] += self.problem.profile.coefficients.ring_hop_seconds
        np.fill_diagonal(seconds, 0.0)
        return np.asarray(seconds.sum(axis=1))


def attention_per_token(work: Work) -> FloatArray:
    """Return [sequences] the mean attention seconds per query, including sliding windows."""
    seconds = work.attention_seconds if work.windows is None else work.attention_seconds + work.windows.seconds
    return np.asarray(seconds / work.tokens)


@dataclass(slots=True)
class Tasks:
    """Attention tasks of a micro-batch: each is some queries of one sequence, on one rank.

    Attributes:
        sequence: [tasks] index of the sequence in the micro-batch.
        tokens: [tasks] number of queries, paired from head and tail of the sequence so that all take equally long.
        home: [tasks] rank that holds the queries.
        rank: [tasks] rank that runs the task.
    """

    sequence: IntArray
    tokens: FloatArray
    home: IntArray
    rank: IntArray

    def hand_over(self, task: int, rank: int, *, share: float) -> None:
        """Move a share of a task to another rank."""
        if share >= 1.0:
            self.rank[task] = rank
            return
        taken = self.tokens[task] * share
        self.tokens[task] -= taken
        self.sequence = np.append(self.sequence, self.sequence[task])
        self.tokens = np.append(self.tokens, taken)
        self.home = np.append(self.home, self.home[task])
        self.rank = np.append(self.rank, rank)


def laid_out(tokens: IntArray, ranks: int) -> Tasks:
    """Return tasks with equally many tokens on each rank, in order; a sequence has a task on each rank it spans."""
    ends = np.cumsum(tokens, dtype=np.float64)
    cuts = np.union1d(ends, ends[-1] * np.arange(1, ranks + 1) / ranks)
    sizes = np.diff(cuts, prepend=0.0)
    middle = cuts - sizes / 2
    home = np.minimum((middle * ranks / ends[-1]).astype(np.int64), ranks - 1)
    kept = sizes > 1e-6  # drop pieces that only exist by rounding
    sequence = np.searchsorted(ends, middle)
    return Tasks(sequence=sequence[kept], tokens=sizes[kept], home=home[kept], rank=home[kept].copy())


def tuned(
    name: str,
    batches: GlobalBatches,
    rank_seconds: Callable[[SpreadAttention, Work], FloatArray],
    *,
    degrees: Sequence[int] = (),
    **options: Any,
) -> SpreadAttention:
    """Make a strategy with the fastest degree over a sample of the steps.

    Args:
        name: the name in the registry.
        batches: the batches to price.
        rank_seconds: see `SpreadAttention`.
        degrees: the degrees to choose from; empty: every divisor of the ranks that holds the longest sequence.
        options: further settings, for the output of `fcp compare`.

    Raises:
        UsageError: the profile lacks the bytes of queries and keys, ranks differ in speed, or there are pipelines.
    """
    problem = batches.problem
    heads = problem.profile.heads
    if heads is None:
        raise UsageError(f"{name} needs a cost profile with the block heads; 'fcp profile --analytic' has it")
    if problem.pipeline is not None or problem.rank_speeds is not None:
        raise UsageError(f"{name} is priced for ranks of one speed without pipeline stages")
    found = [
        SpreadAttention(
            name=name,
            problem=problem,
            heads=heads,
            degree=degree,
            rank_seconds=rank_seconds,
            options={"degree": degree, **options},
        )
        for degree in degrees or holding_degrees(batches)
    ]
    return found[0] if len(found) == 1 else quickest_solver(found, batches)
