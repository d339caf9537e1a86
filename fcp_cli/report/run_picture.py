"""The figures that the page shows of a run beside its plan: predicted against measured, drift, and slow ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.report.page_data import Columns
from fcp_cli.runs.metrics_reader import RunStep

_SCATTER_POINTS = 2_500
_SERIES_POINTS = 400
_RANKS_SHOWN = 16
_POINTS_KEPT = 200_000


@dataclass(kw_only=True)
class RunPicture:
    """The pictures of a run: give `add` every measured step.

    Attributes:
        num_ranks: of the job.
        chosen: the steps whose measured Gantt charts are wanted.
        steps: measured steps that were given, warm-up included.
        bars, ends: of the chosen steps, their rectangles and their seconds.
    """

    num_ranks: int
    chosen: frozenset[int]
    steps: int = 0
    warm_up_steps: int = 0
    bars: dict[int, Columns] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._series: list[tuple[float, ...]] = []
        self._points: list[FloatArray] = []  # [3, micro-batches]: degree, planned, measured
        self._busy = np.zeros(self.num_ranks)
        self._planned = np.zeros(self.num_ranks)

    def add(self, step: RunStep) -> None:
        self.steps += 1
        if step.step in self.chosen:
            self.bars[step.step] = measured_bars(step)
            self.ends[step.step] = step.seconds
        if step.warm_up:
            self.warm_up_steps += 1
            return
        busy, planned = float(step.busy_seconds.sum()), float(step.planned_seconds.sum())
        rates = (step.tokens, step.idle_fraction)
        self._series.append((step.step, step.seconds, step.predicted_seconds, busy, planned, *rates))
        np.add.at(self._busy, step.ranks, step.busy_seconds)
        np.add.at(self._planned, step.ranks, step.planned_seconds)
        if sum(points.shape[1] for points in self._points[-1:]) * len(self._points) < _POINTS_KEPT:
            self._points.append(_groups(step))

    @property
    def is_empty(self) -> bool:
        return not self._series

    def totals(self) -> dict[str, float]:
        """Return median step seconds, seconds measured / planned, tokens/s and idle share of all steps but warm-up."""
        _, seconds, predicted, _, _, tokens, idle = np.array(self._series).T
        return {
            "step_seconds": float(np.median(seconds)),
            "ratio": float(seconds.sum() / predicted.sum()),
            "tokens_per_second": float(tokens.sum() / seconds.sum()),
            "idle": float((idle * seconds).sum() / seconds.sum()),
        }

    def drift(self) -> Columns:
        """Return measured / planned over the steps: of whole steps, and of the micro-batches alone."""
        table = np.array(self._series)
        parts = [part.sum(axis=0) / len(part) for part in np.array_split(table, min(len(table), _SERIES_POINTS))]
        step, seconds, predicted, busy, planned, _, _ = np.array(parts).T
        return {
            "step": step,
            "seconds": seconds,
            "whole": seconds / predicted,
            "micro_batches": busy / np.maximum(planned, 1e-12),
        }

    def _all_points(self) -> FloatArray:
        return np.concatenate(self._points, axis=1)

    def scatter(self) -> Columns:
        """Return planned and measured seconds per micro-batch, thinned out evenly."""
        points = self._all_points()
        degree, planned, measured = points[:, :: max(1, -(-points.shape[1] // _SCATTER_POINTS))]
        return {"degree": degree.astype(np.int64), "planned": planned, "measured": measured}

    def residuals(self) -> Columns:
        """Return quantiles of measured / planned - 1 per degree."""
        degree, planned, measured = self._all_points()
        residual = measured / planned - 1.0
        degrees = np.unique(degree)
        quantiles = [np.quantile(residual[degree == d], (0.1, 0.25, 0.5, 0.75, 0.9)) for d in degrees]
        names = ("p10", "p25", "median", "p75", "p90")
        columns: Columns = dict(zip(names, np.array(quantiles).T, strict=True))
        counts = np.array([np.count_nonzero(degree == d) for d in degrees])
        return {"degree": degrees.astype(np.int64), "micro_batches": counts, **columns}

    def slowest_ranks(self) -> Columns:
        """Return the ranks that took longest for their work, slowest first."""
        ratio = self._busy / np.maximum(self._planned, 1e-12)
        ratio[self._planned == 0] = 0.0
        ranks = np.argsort(-ratio, kind="stable")[:_RANKS_SHOWN]
        return {"rank": ranks, "ratio": ratio[ranks], "place": np.arange(len(ranks))}


def _groups(step: RunStep) -> FloatArray:
    """Return [3, microbatches]: degree, planned and measured seconds; a ring takes as long as its slowest member."""
    works = (step.pack_tokens > 0) & (step.planned_seconds > 0)
    _, index, group = np.unique(step.orders[works], return_index=True, return_inverse=True)
    measured = np.zeros(len(index))
    np.maximum.at(measured, group, step.busy_seconds[works])
    return np.stack([step.degrees[works][index].astype(np.float64), step.planned_seconds[works][index], measured])


def measured_bars(step: RunStep) -> Columns:
    """Return a measured step as rectangles, like `page_data.bars_of`."""
    by_rank = np.lexsort((step.ranks, step.orders))
    by_rank = by_rank[step.pack_tokens[by_rank] > 0]
    orders, ranks = step.orders[by_rank], step.ranks[by_rank]
    # A rectangle begins where the micro-batch changes, and where its ranks are not neighbours.
    first = np.ones(len(orders), dtype=bool)
    first[1:] = (np.diff(orders) != 0) | (np.diff(ranks) != 1)
    starts: IntArray = np.flatnonzero(first)
    begin, end = step.start_seconds[by_rank], (step.start_seconds + step.busy_seconds)[by_rank]
    return {
        "step": np.full(len(starts), step.step),
        "order": orders[starts],
        "degree": step.degrees[by_rank][starts],
        "tokens": step.pack_tokens[by_rank][starts],
        "rank": ranks[starts],
        "top": ranks[starts] + np.diff(np.append(starts, len(orders))),
        "start": np.minimum.reduceat(begin, starts) if len(starts) else begin,
        "end": np.maximum.reduceat(end, starts) if len(starts) else end,
    }
