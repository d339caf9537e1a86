"""Collects figures of a plan and its run for the page in one pass over the steps, downsampled for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.setup import held_tokens
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.report.plan_tables import RanksShown, stage_bars
from fcp_cli.runs.metrics_reader import RunStep
from fcp_cli.util.arrays import FloatArray, IntArray

_HEAT_COLUMNS = 125  # cells along the steps
_HEAT_ROWS = 64  # cells along the ranks
_SERIES_POINTS = 400
_GANTT_BARS = 12_000  # in total over selectable steps
_MOST_GANTT_STEPS = 48
_BINS_PER_OCTAVE = 4
_LENGTH_BINS = 32 * _BINS_PER_OCTAVE
_RANK_STEPS_READ = 2_000_000  # above this, only each k-th step is read

Columns = dict[str, npt.NDArray[np.generic] | list[str]]


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced numbers below `total`, including the first and last."""
    if count >= total:
        return list(range(total))
    return sorted({round(i * (total - 1) / max(count - 1, 1)) for i in range(count)})


def bars_of(step: StepPlan, shown: RanksShown, metadata: PlanMetadata | None = None) -> Columns:
    """Return a step as rectangles: one per micro-batch and run of adjacent rows, without idle ones.

    With pipeline stages, there is one per forward and backward pass of each stage: see `stage_bars`.
    """
    if metadata is not None and metadata.pipeline is not None:
        return {**stage_bars(step, shown, metadata, metadata.pipeline)}
    global_ranks = step.ranks.astype(np.int64)
    wanted = shown.are_shown(global_ranks)
    rows = np.repeat(np.arange(len(step)), step.degrees)[wanted]
    ranks = shown.rows(global_ranks[wanted])
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(ranks) != 1)
    starts = np.flatnonzero(first)
    heights = np.diff(np.append(starts, len(rows)))
    row = rows[starts]
    works = step.tokens[row] > 0
    starts, heights, row = starts[works], heights[works], row[works]
    return {
        "step": np.full(len(row), step.step),
        "order": row,
        "degree": step.degrees[row],
        "tokens": step.tokens[row],
        "rank": ranks[starts],
        "top": ranks[starts] + heights,
        "start": step.start_seconds[row],
        "end": step.start_seconds[row] + step.seconds[row],
        **({} if step.heads_degree is None else {"heads": step.heads_degree[row]}),
    }


def joined(tables: list[Columns]) -> Columns:
    """Concatenate tables with the same columns."""
    if not tables:
        return {}
    return {name: np.concatenate([np.asarray(table[name]) for table in tables]) for name in tables[0]}


@dataclass(kw_only=True)
class HeatMap:
    """Mean idle share per cell of steps x ranks."""

    steps: int
    num_ranks: int
    first_step: int = 0
    total: FloatArray = field(init=False)
    count: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.columns, self.rows = min(self.steps, _HEAT_COLUMNS), min(self.num_ranks, _HEAT_ROWS)
        self.total = np.zeros((self.columns, self.rows))
        self.count = np.zeros((self.columns, self.rows))
        self._row_of_rank = np.arange(self.num_ranks) * self.rows // self.num_ranks

    def add(self, step: int, idle: FloatArray) -> None:
        """Add a step; `idle` is the idle share of each rank, [num_ranks]."""
        column = (step - self.first_step) * self.columns // self.steps
        self.total[column] += np.bincount(self._row_of_rank, weights=idle, minlength=self.rows)
        self.count[column] += np.bincount(self._row_of_rank, minlength=self.rows)

    def cells(self) -> Columns:
        column, row = np.nonzero(self.count)
        # A cell starts at the first step in its column: ceil(column * steps / columns), exactly.
        return {
            "step": self.first_step - (-column * self.steps // self.columns),
            "step_end": self.first_step - (-(column + 1) * self.steps // self.columns),
            "rank": -(-row * self.num_ranks // self.rows),
            "rank_end": -(-(row + 1) * self.num_ranks // self.rows),
            "idle": self.total[column, row] / self.count[column, row],
        }


@dataclass(kw_only=True)
class PlanPicture:
    """Collects figures of a plan; call `compare` with every step in order, then `add` if `wants` says so.

    Attributes:
        every: each `every`-th step is read.
        summary: totals over these steps.
        lengths: [degree, bin] number of sequences by degree and length.
        peak_tokens: [num_ranks] maximum tokens of a rank in a micro-batch.
        groups: hashes of distinct groups by degree.
    """

    metadata: PlanMetadata
    summary: PlanSummary = field(init=False)

    def __post_init__(self) -> None:
        meta = self.metadata
        self.shown = RanksShown.of(meta.num_ranks, meta.ranks_per_node)
        self.every = max(1, -(-meta.steps * meta.num_ranks // _RANK_STEPS_READ))
        self.summary = PlanSummary.of(meta)
        self.heat = HeatMap(steps=meta.steps, num_ranks=meta.num_ranks, first_step=meta.first_step)
        self.lengths = np.zeros((meta.num_ranks + 1, _LENGTH_BINS), dtype=np.int64)
        self.peak_tokens = np.zeros(meta.num_ranks, dtype=np.int64)
        self.groups: dict[int, set[int]] = {}
        self.series: list[tuple[int, float, float]] = []
        self.longest_tokens = 0
        self._chosen: dict[int, Columns] = {}
        self._chosen_steps: set[int] | None = None
        self._slowest: StepPlan | None = None
        self._widest: StepPlan | None = None

    def wants(self, step: int) -> bool:
        return (step - self.metadata.first_step) % self.every == 0

    def add(self, step: StepPlan) -> None:
        meta = self.metadata
        self.summary.add(step)
        self.series.append((step.step, step.makespan_seconds, step.bound_seconds))
        self.heat.add(step.step, 1.0 - step.busy_seconds(meta.num_ranks) / step.makespan_seconds)
        held = -(-held_tokens(step, self.metadata.padding_multiple) // step.degrees)
        np.maximum.at(self.peak_tokens, step.ranks, np.repeat(held, step.degrees))
        for group in step.ring_groups():
            self.groups.setdefault(group.degree, set()).add(hash(group))
        self.longest_tokens = max(self.longest_tokens, int(step.lengths.max(initial=0)))
        # Histogram over (degree, length), with geometric length bins.
        degrees = np.repeat(step.degrees, np.diff(step.sequence_offsets))
        bins = (np.log2(step.lengths) * _BINS_PER_OCTAVE).astype(np.int64)
        counts = np.bincount(degrees * _LENGTH_BINS + bins, minlength=self.lengths.size)
        self.lengths += counts.reshape(self.lengths.shape)
        self._keep_bars(step)

    def _keep_bars(self, step: StepPlan) -> None:
        if self._chosen_steps is None:
            count = max(
                3, min(_MOST_GANTT_STEPS, _GANTT_BARS // max(len(bars_of(step, self.shown, self.metadata)["order"]), 1))
            )
            read = -(-self.metadata.steps // self.every)
            self._chosen_steps = {self.metadata.first_step + i * self.every for i in evenly_spaced(read, count)}
        if step.step in self._chosen_steps:
            self._chosen[step.step] = bars_of(step, self.shown, self.metadata)

    def compare(self, step: StepPlan) -> None:
        """Keep a step, wanted or not, if it is the slowest or has the largest gap so far."""
        if self._slowest is None or step.makespan_seconds > self._slowest.makespan_seconds:
            self._slowest = step
        if self._widest is None or step.gap > self._widest.gap:
            self._widest = step

    def chosen_steps(self) -> dict[int, Columns]:
        """Return the Gantt charts of selectable steps: evenly spaced ones and the worst."""
        for step in (self._slowest, self._widest):
            if step is not None:
                self._chosen.setdefault(step.step, bars_of(step, self.shown, self.metadata))
        return dict(sorted(self._chosen.items()))

    def worst_steps(self) -> tuple[StepPlan, StepPlan]:
        """Return the slowest step and the step with the largest gap to its lower bound."""
        assert self._slowest is not None and self._widest is not None
        return self._slowest, self._widest

    def ends(self) -> dict[int, tuple[float, float]]:
        """Return (makespan, lower bound) of each step read."""
        ends = {step: (makespan, bound) for step, makespan, bound in self.series}
        return ends | {step.step: (step.makespan_seconds, step.bound_seconds) for step in self.worst_steps()}

    def step_series(self) -> Columns:
        """Return makespan and bound over steps, averaged if there are more steps than points."""
        table = np.array(self.series)
        parts = np.array_split(table, min(len(table), _SERIES_POINTS))
        means = np.array([part.mean(axis=0) for part in parts])
        return {"step": means[:, 0], "planned": means[:, 1], "bound": means[:, 2]}

    def length_bars(self) -> Columns:
        """Return the length histogram as stacked rectangles, lowest degree first."""
        degree, bin_ = np.nonzero(self.lengths)
        tops = np.cumsum(self.lengths, axis=0)
        return {
            "degree": degree,
            "shortest": 2.0 ** (bin_ / _BINS_PER_OCTAVE),
            "longest": 2.0 ** ((bin_ + 1) / _BINS_PER_OCTAVE),
            "sequences": self.lengths[degree, bin_],
            "bottom": (tops - self.lengths)[degree, bin_],
            "top": tops[degree, bin_],
        }

    def peak_bars(self) -> Columns:
        """Return peak tokens per rank, or per bin of ranks if there are many."""
        bins = np.array_split(np.arange(self.metadata.num_ranks), min(self.metadata.num_ranks, 2 * _HEAT_ROWS))
        return {
            "rank": np.array([ranks[0] for ranks in bins]),
            "rank_end": np.array([ranks[-1] + 1 for ranks in bins]),
            "most": np.array([self.peak_tokens[ranks].max() for ranks in bins]),
        }

    def degree_boundaries(self) -> IntArray:
        """Return the maximum length of a sequence at degree 1, 2, 4, ..."""
        powers = 2 ** np.arange(int(np.log2(self.metadata.num_ranks)) + 1, dtype=np.int64)
        held = self.metadata.tokens_per_rank * powers
        return np.asarray(held[held <= 2 * self.longest_tokens], dtype=np.int64)


_SCATTER_POINTS = 2_500
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
