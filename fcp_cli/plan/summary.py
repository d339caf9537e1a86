"""Totals of a plan, accumulated step by step for the report after planning and for `fcp inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.setup import held_tokens
from fcp_cli.plan.step import StepPlan


@dataclass(slots=True)
class DegreeTotals:
    """Totals over the micro-batches of one degree.

    Attributes:
        heads_degrees: number of micro-batches per Ulysses degree; empty if the plan has no Ulysses degrees.
    """

    microbatches: int = 0
    tokens: int = 0
    rank_seconds: float = 0.0
    heads_degrees: Counter[int] = field(default_factory=Counter)

    def shapes(self, degree: int) -> str:
        """Return the u x r shapes of groups of this degree and their counts as text, most frequent first."""
        return ", ".join(f"{u} x {degree // u}: {count:,}" for u, count in self.heads_degrees.most_common())


@dataclass(kw_only=True, slots=True)
class PlanSummary:
    """Totals over the steps passed to `add`; idle rows count as idle time, not as micro-batches.

    Attributes:
        peers: peer count of the ranks, or None if not needed.
        busiest_seconds: sum over steps of the compute seconds of the step's busiest rank; None without pipelines.
    """

    num_ranks: int
    padding_multiple: int | None = None
    peers: PeerCount | None = None
    busiest_seconds: float | None = None
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    held_tokens: int = 0  # with padding
    makespan_seconds: float = 0.0
    bound_seconds: float = 0.0
    busy_rank_seconds: float = 0.0
    slowest_step: int = 0
    slowest_step_seconds: float = 0.0
    degrees: dict[int, DegreeTotals] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: PlanMetadata) -> PlanSummary:
        """Return an empty summary for a plan."""
        return cls(
            num_ranks=metadata.num_ranks,
            padding_multiple=metadata.padding_multiple,
            peers=PeerCount(num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node),
            busiest_seconds=None if metadata.pipeline is None else 0.0,
        )

    def add(self, step: StepPlan) -> None:
        """Add the totals of a step."""
        self.steps += 1
        if self.peers is not None:
            self.peers.add(step)
        self.sequences += len(step.sequences)
        self.tokens += int(step.lengths.sum(dtype=np.int64))
        self.held_tokens += int(held_tokens(step, self.padding_multiple).sum())
        self.makespan_seconds += step.makespan_seconds
        self.bound_seconds += step.bound_seconds
        self.busy_rank_seconds += float((step.seconds * step.degrees).sum())
        if step.makespan_seconds > self.slowest_step_seconds:
            self.slowest_step, self.slowest_step_seconds = step.step, step.makespan_seconds
        if self.busiest_seconds is not None:
            self.busiest_seconds += float(step.busy_seconds(self.num_ranks).max())
        self._add_degrees(step)

    def _add_degrees(self, step: StepPlan) -> None:
        working = np.diff(step.sequence_offsets) > 0
        degrees = step.degrees[working]
        tokens = np.bincount(degrees, weights=step.tokens[working])
        seconds = np.bincount(degrees, weights=step.seconds[working])
        for degree, count in enumerate(np.bincount(degrees).tolist()):
            if count:
                totals = self.degrees.setdefault(degree, DegreeTotals())
                totals.microbatches += count
                totals.tokens += int(tokens[degree])
                totals.rank_seconds += degree * float(seconds[degree])
        if step.heads_degree is not None:
            for degree, heads_degree in zip(degrees.tolist(), step.heads_degree[working].tolist(), strict=True):
                self.degrees[degree].heads_degrees[heads_degree] += 1

    @property
    def mean_step_seconds(self) -> float:
        return self.makespan_seconds / max(self.steps, 1)

    @property
    def gap(self) -> float:
        """Sum of makespans / sum of lower bounds - 1."""
        return self.makespan_seconds / self.bound_seconds - 1.0 if self.bound_seconds else 0.0

    @property
    def idle_fraction(self) -> float:
        """Idle share of all rank-seconds."""
        total = self.num_ranks * self.makespan_seconds
        return 1.0 - self.busy_rank_seconds / total if total else 0.0

    @property
    def bubble_fraction(self) -> float | None:
        """Share of the step time in which even the busiest rank idles; None without pipelines."""
        if self.busiest_seconds is None:
            return None
        return 1.0 - self.busiest_seconds / self.makespan_seconds if self.makespan_seconds else 0.0

    @property
    def padding_fraction(self) -> float:
        """Tokens with padding / tokens - 1."""
        return self.held_tokens / max(self.tokens, 1) - 1.0

    @property
    def microbatches(self) -> int:
        return sum(totals.microbatches for totals in self.degrees.values())

    def to_json(self) -> Mapping[str, Any]:
        """Return JSON values, for `--json`."""
        return {
            "steps": self.steps,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "padding_fraction": self.padding_fraction,
            "micro_batches": self.microbatches,
            "total_seconds": self.makespan_seconds,
            "mean_step_seconds": self.mean_step_seconds,
            "slowest_step": self.slowest_step,
            "slowest_step_seconds": self.slowest_step_seconds,
            "mean_bound_seconds": self.bound_seconds / max(self.steps, 1),
            "gap": self.gap,
            "idle_fraction": self.idle_fraction,
            **({} if self.bubble_fraction is None else {"bubble_fraction": self.bubble_fraction}),
            **({} if self.peers is None else self.peers.to_json()),
            "degrees": {
                str(degree): {
                    "micro_batches": totals.microbatches,
                    "tokens": totals.tokens,
                    "rank_seconds": totals.rank_seconds,
                    **({"heads_degrees": _by_number(totals.heads_degrees)} if totals.heads_degrees else {}),
                }
                for degree, totals in sorted(self.degrees.items())
            },
        }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counts.items())}
