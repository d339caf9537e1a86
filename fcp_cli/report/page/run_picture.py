"""Collects a run's figures for the page: predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.report.page.page_data import Columns, HeatMap
from fcp_cli.report.ranks_shown import RanksShown
from fcp_cli.runs.metrics.metrics_reader import RunStep

_SCATTER_POINTS = 2_500
_SERIES_POINTS = 400
_POINTS_KEPT = 200_000


@dataclass(kw_only=True)
class RunPicture:
    """Collects figures of a run; call `add` with every measured step.

    Attributes:
        plan: plan that the run followed.
        chosen: steps that need measured Gantt charts.
        steps: number of measured steps, including warm-up.
        bars, ends: rectangles and durations of the chosen steps.
        evaluations: held-out loss by step.
    """

    plan: PlanMetadata
    chosen: frozenset[int]
    steps: int = 0
    warm_up_steps: int = 0
    bars: dict[int, Columns] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meta = self.plan
        self.shown = RanksShown.of(meta.num_ranks, meta.ranks_per_node)
        self.heat = HeatMap(steps=meta.steps, num_ranks=meta.num_ranks, first_step=meta.first_step)
        self.peak_bytes: IntArray = np.zeros(meta.num_ranks, dtype=np.int64)
        self._losses: list[tuple[float, float]] = []
        self._series: list[tuple[float, ...]] = []
        self._points: list[FloatArray] = []  # [3, micro-batches]: degree, planned, measured

    def add(self, step: RunStep) -> None:
        self.steps += 1
        if step.loss is not None:
            self._losses.append((step.step, step.loss))
        if len(step.peak_bytes) == len(self.peak_bytes):
            np.maximum(self.peak_bytes, step.peak_bytes, out=self.peak_bytes)
        if step.step in self.chosen:
            self.bars[step.step] = measured_bars(step, self.shown)
            self.ends[step.step] = step.seconds
        if step.warm_up:
            self.warm_up_steps += 1
            return
        planned = float(step.planned_seconds.sum())
        rates = (step.tokens, step.idle_fraction)
        self._series.append((step.step, step.seconds, step.predicted_seconds, planned, *rates))
        worked = np.bincount(step.ranks, weights=step.busy_seconds, minlength=self.plan.num_ranks)
        self.heat.add(step.step, np.clip(1.0 - worked / step.seconds, 0.0, 1.0))
        if sum(points.shape[1] for points in self._points[-1:]) * len(self._points) < _POINTS_KEPT:
            self._points.append(_groups(step))

    @property
    def is_empty(self) -> bool:
        return not self._series

    def totals(self) -> dict[str, float]:
        """Return statistics over all steps after warm-up: mean and slowest step seconds, tokens/s, idle share.

        `predicted_` ones are the planned values of the same steps; `ratio` is measured / planned seconds.
        """
        _, seconds, predicted, planned, tokens, idle = np.array(self._series).T
        return {
            "step_seconds": float(seconds.mean()),
            "slowest_seconds": float(seconds.max()),
            "ratio": float(seconds.sum() / predicted.sum()),
            "tokens_per_second": float(tokens.sum() / seconds.sum()),
            "idle": float((idle * seconds).sum() / seconds.sum()),
            "predicted_step_seconds": float(predicted.mean()),
            "predicted_slowest_seconds": float(predicted.max()),
            "predicted_tokens_per_second": float(tokens.sum() / predicted.sum()),
            "predicted_idle": max(0.0, float(1.0 - planned.sum() / (self.plan.num_ranks * predicted.sum()))),
        }

    def losses(self) -> Columns | None:
        """Return the loss over steps, averaged if there are more steps than points; None if unknown."""
        return _over_steps(self._losses) if len(self._losses) > 1 else None

    def held_out_losses(self) -> Columns | None:
        """Return the held-out loss over steps, like `losses`; None if there was no evaluation."""
        return _over_steps([*self.evaluations.items()]) if self.evaluations else None

    def step_times(self) -> Columns:
        """Return measured seconds over steps, averaged if there are more steps than points."""
        step, seconds = np.array([part.mean(axis=0) for part in _parts(np.array(self._series)[:, :2])]).T
        return {"step": step, "seconds": seconds}

    def scatter(self) -> Columns:
        """Return planned and measured seconds per micro-batch, evenly sampled."""
        points = np.concatenate(self._points, axis=1)
        degree, planned, measured = points[:, :: max(1, -(-points.shape[1] // _SCATTER_POINTS))]
        return {"degree": degree.astype(np.int64), "planned": planned, "measured": measured}


def _over_steps(losses: Sequence[tuple[float, float]]) -> Columns:
    step, loss = np.array([part.mean(axis=0) for part in _parts(np.array(losses))]).T
    return {"step": step, "loss": loss}


def _parts(table: FloatArray) -> list[FloatArray]:
    return np.array_split(table, min(len(table), _SERIES_POINTS))


def _groups(step: RunStep) -> FloatArray:
    """Return degree, planned and measured seconds, [3, micro-batches]; the slowest member determines a ring's time."""
    works = (step.pack_tokens > 0) & (step.planned_seconds > 0)
    _, index, group = np.unique(step.orders[works], return_index=True, return_inverse=True)
    measured = np.zeros(len(index))
    np.maximum.at(measured, group, step.busy_seconds[works])
    return np.stack([step.degrees[works][index].astype(np.float64), step.planned_seconds[works][index], measured])


def measured_bars(step: RunStep, shown: RanksShown) -> Columns:
    """Return a measured step as rectangles, like `page_data.bars_of`."""
    by_rank = np.lexsort((step.ranks, step.orders))
    by_rank = by_rank[(step.pack_tokens[by_rank] > 0) & shown.are_shown(step.ranks[by_rank])]
    orders, ranks = step.orders[by_rank], shown.rows(step.ranks[by_rank])
    # A rectangle starts where the micro-batch changes or ranks are not adjacent.
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
