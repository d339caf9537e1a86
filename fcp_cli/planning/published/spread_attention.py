"""Prices of steps whose attention runs apart from the tokens: by tasks, blocks or chunks on any ranks of a group.

No plan of rings can run these executions, so only `fcp compare` prices them. All are priced on the same device and
links by the cost profile, with these assumptions, each of which favours the strategy:

- Ranks of a group wait for each other once a micro-batch, not at each layer.
- Messages travel at the ring's bandwidth, both ways at once, and take `ring_hop_seconds` per rank that sends any.
  Attention hides them, or, if two halves of a micro-batch alternate ("ping-pong"), all computation.
- Keys and values are fetched again in the backward, where their gradients return; a ping-pong keeps them from the
  forward, and their memory is not counted.
- A further kernel on some queries costs the same as a further hop of a ring (`chunk_seconds_per_token`).

The bound is all work shared evenly, with the fixed seconds of the micro-batches that its tokens need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import Heads
from fcp_cli.errors import UsageError
from fcp_cli.planning.baselines.drafts import quickest_solver
from fcp_cli.planning.baselines.static import holding_degrees
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.bounds import area_bound_seconds
from fcp_cli.planning.problem import Batch, PricedStep, Problem
from fcp_cli.planning.published.wlb_llm import packs_of_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadAttention:
    """Prices every batch in micro-batches of equal groups of ranks.

    Attributes:
        name: the name, as in the registry.
        heads: bytes of queries and keys.
        rank_seconds: returns [degree] the seconds of one micro-batch on each rank of a group.
        options: settings, for the outcome.
    """

    name: str
    problem: Problem
    heads: Heads
    degree: int
    rank_seconds: Callable[[SpreadAttention, Work], FloatArray]
    options: Mapping[str, Any]

    def price(self, batch: Batch) -> PricedStep:
        """Predict the seconds of one step."""
        problem, step = self.problem, self.problem.profile.step
        closing, floor = step.closing_seconds(problem.sync), step.floor_seconds(problem.sync)
        of_ranks = [self.rank_seconds(self, batch.work.take(np.array(pack))) for pack in self._packs(batch.work)]
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
        """Pack a batch for as few micro-batches a group as hold it: by tokens for one group, else by work."""
        groups, limit = self.problem.num_ranks // self.degree, self.degree * self.problem.tokens_per_rank
        weights = work.tokens.astype(np.float64) if groups == 1 else work.total_seconds
        return packs_of_groups(work.tokens, weights, groups=groups, limit=limit)

    def task_seconds(self, tasks: Tasks, work: Work, kernels: FloatArray, *, ping_pong: bool) -> FloatArray:
        """Return [degree] the seconds of a micro-batch of tasks, each with all keys of its sequence.

        Args:
            tasks: the rank that runs each, and the rank that holds its queries and runs its other layers.
            work: [sequences] of the micro-batch.
            kernels: [tasks] that each runs beyond its first.
            ping_pong: all computation hides messages, and fetched keys are kept.
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
        """Return [degree] the seconds of all messages to a rank, while others leave it.

        Args:
            keys: [to, from] tokens whose keys and values travel.
            queries: [to, from] tokens whose queries travel, and whose outputs return; None: they stay.
            kept: fetched keys are kept for the backward; else of a ring's bytes two thirds go to the rank that fetches,
                in forward and backward, and the gradients, a third, come from it.
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
    """Return [sequences] the seconds of attention of one query, a pair of a head's and a tail's, windows included."""
    seconds = work.attention_seconds if work.windows is None else work.attention_seconds + work.windows.seconds
    return np.asarray(seconds / work.tokens)


@dataclass(slots=True)
class Tasks:
    """Attention of one micro-batch: each task is some queries of one sequence, on one rank.

    Attributes:
        sequence: [tasks] index into the micro-batch.
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


def laid_out(tokens: IntArray, ranks: int) -> Tasks:
    """Give all ranks equally many tokens, in order; a sequence that is cut is a task on each of its ranks."""
    ends = np.cumsum(tokens, dtype=np.float64)
    cuts = np.union1d(ends, ends[-1] * np.arange(1, ranks + 1) / ranks)
    sizes = np.diff(cuts, prepend=0.0)
    middle = cuts - sizes / 2
    home = np.minimum((middle * ranks / ends[-1]).astype(np.int64), ranks - 1)
    kept = sizes > 1e-6  # a cut that equals an end except for rounding leaves no task
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
    """Make a strategy with the degree that is quickest over a sample of the steps.

    Args:
        name: the name, as in the registry.
        batches: the batches to price.
        rank_seconds: see `SpreadAttention`.
        degrees: the degrees to choose from; none: every divisor of the ranks that holds the longest sequence.
        options: further settings, for the outcome.

    Raises:
        UsageError: the profile lacks the bytes of queries and keys, or ranks run stages.
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
