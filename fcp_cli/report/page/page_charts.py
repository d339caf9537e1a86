"""The charts of the page, keyed by element id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.report.memory import planned_memory
from fcp_cli.report.page import charts
from fcp_cli.report.page.chart_parts import DegreeColours, Spec
from fcp_cli.report.page.page_data import Columns, PlanPicture, bars_of, joined
from fcp_cli.report.page.run_picture import RunPicture
from fcp_cli.report.ranks_shown import RanksShown

Charts = Iterator[tuple[str, Spec]]
_GAIN_HEIGHT = 210


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Predicted gain over the best static plan.

    Attributes:
        factor: None if unknown; `remark` says why.
        remark: description of the comparison.
        degree: degree of the static plan.
        ours, static: a typical step as planned, and under the static degree.
    """

    factor: float | None
    remark: str
    degree: int = 0
    ours: StepPlan | None = None
    static: StepPlan | None = None


def has_measured_steps(run: RunPicture | None) -> bool:
    """Return whether a run has measured steps after warm-up."""
    return run is not None and not run.is_empty


def charts_of(plan: PlanPicture, run: RunPicture | None, ours: StepPlan | None, static: StepPlan | None) -> Charts:
    """Yield (element id, chart) for a plan, its run, and a step compared with the static plan."""
    degrees = set(plan.summary.degrees) | ({int(static.degrees.max())} if static is not None else set())
    colours, everyone = DegreeColours(degrees), RanksShown.all_of(plan.metadata)
    if ours is not None and static is not None:
        yield from _gain(plan, ours, static, colours)
    measured = run if has_measured_steps(run) else None
    step_times = measured.step_times() if measured is not None else None
    yield "chart-steps", charts.step_chart(plan.step_series(), step_times)
    if run is not None and (losses := run.losses()) is not None:
        yield "chart-loss", charts.loss_chart(losses, run.held_out_losses())
    yield from _inside_a_step(plan, run, colours)
    maps, most = idle_maps(plan, run)
    for place, cells in maps.items():
        yield place, charts.heat_chart(cells, ranks=everyone, most=most)
    budget, tokens = plan.metadata.tokens_per_rank, plan.degree_boundaries()
    boundaries: Columns = {"tokens": tokens, "label": [str(each // budget) for each in tokens.tolist()]}
    yield "chart-lengths", charts.length_chart(plan.length_bars(), boundaries, colours)
    yield "chart-mix", charts.mix_chart(_mix(plan), colours)
    yield "chart-memory", _memory(plan, run, everyone)
    if measured is not None:
        yield "chart-scatter", charts.scatter_chart(measured.scatter(), colours)


def idle_maps(plan: PlanPicture, run: RunPicture | None) -> tuple[dict[str, Columns], float]:
    """Return the planned and measured idle maps, and the idle share drawn in full colour."""
    maps = {"chart-heat": plan.heat.cells()}
    if run is not None and has_measured_steps(run):
        maps["chart-waited"] = run.heat.cells()
    return maps, charts.largest_idle(*maps.values())


def _gain(plan: PlanPicture, ours: StepPlan, static: StepPlan, colours: DegreeColours) -> Charts:
    """Yield the charts of a step under the best static degree and as planned, on a common time axis."""
    # Both charts get both lines, so that they have the same axis.
    at = [ours.makespan_seconds, static.makespan_seconds]
    ends: Columns = {"at": np.array(at), "what": ["this plan ends", "static ends"]}
    for place, step in (("chart-static", static), ("chart-ours", ours)):
        bars = bars_of(step, plan.shown, plan.metadata)
        chart = charts.gantt_chart(bars, ends, colours, shown=plan.shown)
        rectangles, rules = chart["layer"][0]["encoding"], chart["layer"][-1]["encoding"]
        # A single legend above both charts and one below.
        rectangles["color"] = colours.encoding([*static.degrees, *ours.degrees] if step is static else [])
        if step is static:
            rectangles["x"]["title"] = rules["strokeDash"]["legend"] = None
        yield place, {**chart, "height": min(_GAIN_HEIGHT, chart["height"])}


def _inside_a_step(plan: PlanPicture, run: RunPicture | None, colours: DegreeColours) -> Charts:
    chosen = plan.chosen_steps()
    ends = _step_ends(plan, run)
    options: dict[str, Any] = {"shown": plan.shown, "first": plan.worst_steps()[0].step}
    yield "chart-gantt", charts.gantt_chart(joined([*chosen.values()]), ends, colours, **options)
    if run is not None and run.bars:
        yield "chart-measured", charts.gantt_chart(joined([*run.bars.values()]), ends, colours, **options)


def _step_ends(plan: PlanPicture, run: RunPicture | None) -> Columns:
    """Return the lines of Gantt charts: a step's bound, planned end and measured end."""
    ends, measured = plan.ends(), run.ends if run is not None else {}
    rows = []
    for step in plan.chosen_steps():
        planned, bound = ends[step]
        rows += [(step, bound, "bound"), (step, planned, "planned end")]
        rows += [(step, measured[step], "measured end")] if step in measured else []
    steps, at, what = zip(*rows, strict=True)
    return {"step": np.array(steps), "at": np.array(at), "what": list(what)}


def _mix(plan: PlanPicture) -> Columns:
    rows = [(degree, *shares) for degree, shares in degree_shares(plan).items()]
    names = ("micro-batches", "tokens", "rank-seconds")
    return {
        "degree": np.repeat(np.array([row[0] for row in rows]), len(names)),
        "measure": [*names] * len(rows),
        "share": np.array([share for row in rows for share in row[1:]], dtype=np.float64),
    }


def degree_shares(plan: PlanPicture) -> dict[int, tuple[float, float, float]]:
    """Return each degree's shares of micro-batches, tokens and rank-seconds."""
    summary = plan.summary
    return {
        degree: (
            totals.microbatches / max(summary.microbatches, 1),
            totals.tokens / max(summary.tokens, 1),
            totals.rank_seconds / (summary.busy_rank_seconds or 1.0),
        )
        for degree, totals in sorted(summary.degrees.items())
    }


def device_bytes(metadata: PlanMetadata) -> float:
    """Return the device memory in the plan's cost profile; 0 if unknown."""
    return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").memory.capacity_bytes


def _memory(plan: PlanPicture, run: RunPicture | None, ranks: RanksShown) -> Spec:
    """Plot memory in GB if the memory model knows the job, else tokens of the budget."""
    metadata, bars = plan.metadata, plan.peak_bars()
    peers = plan.summary.peers
    memory = planned_memory(metadata, peers.most if peers is not None else 0)
    capacity = device_bytes(metadata)
    if memory is None or not capacity:
        return charts.memory_chart(bars, most=metadata.tokens_per_rank, unit="tokens", ranks=ranks)
    most = np.asarray(bars["most"], dtype=np.float64)
    bars["most"] = np.array([memory.total_bytes(tokens) / 1e9 for tokens in most.tolist()])
    if run is not None and run.peak_bytes.any():
        pairs = zip(np.asarray(bars["rank"]).tolist(), np.asarray(bars["rank_end"]).tolist(), strict=True)
        bars["measured"] = np.array([run.peak_bytes[first:end].max() / 1e9 for first, end in pairs])
    return charts.memory_chart(bars, most=capacity / 1e9, unit="GB", ranks=ranks)
