"""Graphs that cuDNN builds while ranks follow a plan: `python -m benchmarks.kernel_shapes plan.parquet`.

cuDNN builds a graph for each new shape of a call, in each thread and direction, and keeps it. Chunks of a ring differ
by a token, so nearly every sequence of a ring brings shapes of its own. Per rule that decides which sequences of an
unmeasured job run on cuDNN, and whether lengths of one power of two share a graph:

- sequences: the share of a rank's query-key pairs that run on cuDNN.
- new a step: shapes that a rank has not seen before, mean and most over ranks and steps.
- kept: graphs of a rank after the last step, at most; two per shape, and three if layers are recomputed whole.
- ring: builds that a ring waits for, hop by hop the most of any member, over those of one member.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli.cost.kernels import LEAST_TOKENS_OF_SHARED_GRAPHS, LEAST_UNMEASURED_TOKENS, pays_for_graphs
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.kernels.cudnn import MOST_BATCHES, MOST_GRAPHS
from fcp_cli.runtime.layout import RingMember, Segments, shard_layout

GRAPH_SECONDS = 0.042  # pytorch#191576
Shape = tuple[int, ...]


@dataclass(kw_only=True)
class Rule:
    """A choice of sequences for cuDNN, and the graphs that it leads to.

    Attributes:
        least_tokens: tokens of a causal sequence, or the geometric mean of a hop's, from which cuDNN is used.
        shares: whether lengths of one power of two share a graph.
        most_graphs: graphs of a process after which new shapes run on another kernel.
        seen: shapes of each rank.
        new: new shapes of each rank and step.
        waits, builds: builds that rings waited for, and the mean of their members' own.
    """

    name: str
    least_tokens: float
    least_queries: int = 0
    shares: bool = False
    most_graphs: float = float("inf")
    graphs_per_shape: int = 2
    seen: dict[int, set[Shape]] = field(default_factory=lambda: defaultdict(set))
    new: list[int] = field(default_factory=list)
    pairs: float = 0.0
    all_pairs: float = 0.0
    waits: float = 0.0
    builds: float = 0.0

    def shapes(self, segments: Segments, rank: int) -> set[Shape]:
        """Return the shapes of a call's sequences that run on cuDNN: the longest, as `ChosenKernel` splits packs."""
        sides = list(zip(segments.q_lengths, segments.k_lengths, strict=True))
        long = [at for at, pair in enumerate(sides) if min(pair) > 1 and self.takes(*pair, segments.causal)]
        long = sorted(long, key=lambda at: -sides[at][0])[:MOST_BATCHES]
        found: set[Shape] = set()
        self.all_pairs += sum(rows * keys for rows, keys in sides)
        for at, run in groupby(range(len(sides)), lambda at: sides[at] if at in long else None):
            if at is None:
                continue
            count = len(list(run))
            rows, keys = map(self.rounded, at)
            shape = (count, rows, keys, segments.causal)
            if shape in self.seen[rank] or len(self.seen[rank]) * self.graphs_per_shape < self.most_graphs:
                self.pairs += count * at[0] * at[1]
                found.add(shape)
        return found

    def takes(self, rows: int, keys: int, causal: bool) -> bool:
        return rows >= self.least_queries and pays_for_graphs(rows, keys, causal=causal, tokens=self.least_tokens)

    def rounded(self, length: int) -> int:
        return 1 << (length - 1).bit_length() if self.shares else length

    def follow(self, row: MicroBatch, new: dict[int, int]) -> None:
        """Count the new shapes of a micro-batch."""
        layout = shard_layout(tuple(row.lengths), row.degree)
        builds = np.zeros((row.degree, row.degree), dtype=np.int64)  # [members, hops]
        for index, rank in enumerate(row.ranks):
            member = RingMember(layout, index, tuple(row.ranks))
            for hop in range(row.degree):
                for work in member.work(hop):
                    found = self.shapes(work.segments, rank) - self.seen[rank]
                    builds[index, hop] += len(found)
                    self.seen[rank] |= found
            new[rank] += int(builds[index].sum())
        if row.degree > 1:
            self.waits += builds.max(axis=0).sum()
            self.builds += builds.sum() / row.degree

    def line(self) -> str:
        kept = max((len(shapes) for shapes in self.seen.values()), default=0)
        new, ring = np.array(self.new), self.waits / self.builds if self.builds else 0.0
        seconds = kept * self.graphs_per_shape * GRAPH_SECONDS
        return (
            f"{self.name:34} {self.pairs / self.all_pairs:5.0%}   {new.mean():6.2f} {new.max():4d}   "
            f"{kept * self.graphs_per_shape:6d} ({seconds:5.1f} s)   {ring:.2f}"
        )


def rules(graphs_per_shape: int) -> Iterator[Rule]:
    """An earlier rule, those of today for a graph per length and for shared ones, and what the cap does to them."""
    least, shared = LEAST_UNMEASURED_TOKENS, LEAST_TOKENS_OF_SHARED_GRAPHS
    every: dict[str, Any] = {"graphs_per_shape": graphs_per_shape}
    yield Rule(name="8,192 queries", least_tokens=0, least_queries=8192, **every)
    yield Rule(name=f"{least:,} tokens", least_tokens=least, most_graphs=MOST_GRAPHS, **every)
    yield Rule(name=f"{shared:,} tokens", least_tokens=shared, **every)
    yield Rule(name=f"{shared:,} tokens, with a cap", least_tokens=shared, most_graphs=MOST_GRAPHS, **every)
    yield Rule(name=f"{shared:,} tokens, shared graphs", least_tokens=shared, shares=True, **every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--recomputed", action="store_true", help="layers are recomputed whole")
    args = parser.parse_args()
    reader = PlanReader(args.plan)
    tried = list(rules(3 if args.recomputed else 2))
    for step in reader.steps():
        for rule in tried:
            new = dict.fromkeys(range(reader.metadata.num_ranks), 0)
            for row in step.microbatches():
                rule.follow(row, new)
            rule.new += new.values()
    print(f"{'sequences on cuDNN from':34} pairs  new a step, most      kept at most      ring")
    for rule in tried:
        print(rule.line())


if __name__ == "__main__":
    main()
