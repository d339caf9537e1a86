"""Vega-Lite charts of a plan and of a run's measured steps.

Text and lines use `currentColor`, so that the style sheet alone controls light, dark and print themes. Data is inlined
as CSV, which is half the size of JSON rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.report.page_data import Columns, PlanPicture, RunPicture, bars_of, joined
from fcp_cli.report.plan_tables import RanksShown
from fcp_cli.report.profiles import planned_memory

Spec = dict[str, Any]

# Blue for small degrees, warm for large ones, ever darker: distinguishable for colour-blind readers.
_PALETTE = ("#a9bacb", "#78aedd", "#4488c7", "#285f9c", "#f2bd55", "#e08b36", "#c25a2b", "#8f3f63")
PLANNED, MEASURED, BOUND = "#3b82c4", "#dd7a2f", "#7c8894"

CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titlePadding": 8,
        "labelSeparation": 5,
        **dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), "currentColor"),
        "gridOpacity": 0.13,
        "domainOpacity": 0.5,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "orient": "top",
        "titleOrient": "left",
        "titlePadding": 8,
        "titleFontWeight": "normal",
    },
    "rule": {"color": "currentColor"},
    "text": {"color": "currentColor"},
}


class DegreeColours:
    """A colour per degree, or per range of degrees if there are more degrees than colours."""

    def __init__(self, degrees: Iterable[int]) -> None:
        found = sorted(set(degrees))
        if len(found) <= len(_PALETTE):
            self._labels = {degree: str(degree) for degree in found}
        else:
            self._labels = {degree: _range_label(degree, found[-1]) for degree in found}
        self.domain = list(dict.fromkeys(self._labels[degree] for degree in found))

    def with_labels(self, columns: Columns) -> Columns:
        """Add the column `colour`, the label of each row's degree."""
        degrees = np.asarray(columns["degree"]).tolist() if columns else []
        return {**columns, "colour": [self._labels.get(degree, self.domain[-1]) for degree in degrees]}

    def encoding(self, shown: Iterable[int] | None = None) -> Spec:
        """Encode the degree as colour, with a legend of the degrees `shown`, or of all if None."""
        scale = {"domain": self.domain, "range": list(_PALETTE[: len(self.domain)])}
        wanted = sorted({*self._labels} if shown is None else {*shown} & {*self._labels})
        values = list(dict.fromkeys(self._labels[degree] for degree in wanted))
        lines = -(-len(values) // 5)  # a longer row would be cut off on a phone
        legend = {"columns": -(-len(values) // lines), "values": values} if values else None
        return {"field": "colour", "type": "ordinal", "title": "degree", "scale": scale, "legend": legend}


def _range_label(degree: int, largest: int) -> str:
    """Return the range that contains a degree: 1, 2, 3-4, 5-8, ..., and everything above 64."""
    exponent = (degree - 1).bit_length()
    if exponent >= len(_PALETTE) - 1:
        return f"{2 ** (len(_PALETTE) - 2) + 1}-{largest}"
    first, last = 2**exponent // 2 + 1, 2**exponent
    return str(degree) if degree <= 2 else f"{first}-{last}"


def inline_csv(columns: Columns) -> Spec:
    """Format a table as Vega's inline CSV, with 5 digits: more than a screen can show."""
    texts = [
        [(f"{value:.5g}" if isinstance(value, float) else str(value)) for value in np.asarray(column).tolist()]
        for column in columns.values()
    ]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([list(columns), *zip(*texts, strict=True)])
    numbers = {name: "number" for name, column in columns.items() if not isinstance(column, list)}
    return {"values": table.getvalue(), "format": {"type": "csv", "parse": numbers}}


def x_of(field: str, title: str, **more: Any) -> Spec:
    """Encode a field on an axis."""
    return {"field": field, "type": "quantitative", "title": title, **more}


y_of = x_of


def tooltip(**fields: str) -> list[Spec]:
    """Return tooltip fields with titles."""
    return [{"field": field, "title": title} for field, title in fields.items()]


def chart(description: str, height: int, **parts: Any) -> Spec:
    """Start a chart that fills its container's width."""
    return {"description": description, "width": "container", "height": height, **parts}


def percent(field: str, title: str) -> Spec:
    """Return a tooltip field for a percentage."""
    return {"field": field, "title": title, "type": "quantitative", "format": ".2%"}


def steps_axis(steps: Columns) -> Spec:
    """Return an axis with ticks at existing steps; `steps` has a column `step`."""
    column = np.asarray(steps["step"], dtype=np.float64)
    first, last = int(column.min()), int(column.max())
    return {"values": list(range(first, last + 1, -(-(last + 1 - first) // 8))), "format": ",d", "grid": False}


def step_chart(series: Columns, measured: Columns | None) -> Spec:
    """Plot planned seconds, lower bound and measured seconds over steps."""
    names = [name for name in _SERIES if name != "measured" or measured is not None]
    axis = steps_axis(series)  # shared: there may be fewer measured steps
    lines = [_line(series, "planned", "planned", names, axis), _line(series, "bound", _BOUND_NAME, names, axis)]
    lines[1]["mark"]["strokeDash"] = [5, 5]  # dashed, so that both are visible if a plan reaches its bound
    if measured is not None:
        lines.append(_line(measured, "seconds", "measured", names, axis))
    return chart("Step time over the steps of the plan", 200, layer=lines)


_BOUND_NAME = "bound under this cost profile"
_SERIES = {"planned": PLANNED, _BOUND_NAME: BOUND, "measured": MEASURED}


def loss_chart(losses: Columns, held_out: Columns | None) -> Spec:
    """Plot training loss over steps, and held-out loss if there is one."""
    colours = {"training": MEASURED, "held out": "currentColor"}
    lines = {"training": losses, **({"held out": held_out} if held_out is not None else {})}
    scale = {"domain": [*lines], "range": [colours[name] for name in lines]}
    axis = steps_axis(losses)
    layers = [
        {
            "data": inline_csv(line),
            "mark": {"type": "line", "strokeWidth": 1.8, "point": len(line["step"]) < 12},
            "encoding": {
                "x": x_of("step", "step", axis=axis, scale={"nice": False, "zero": False}),
                "y": y_of("loss", "loss per token", scale={"zero": False}),
                "color": {"datum": name, "scale": scale, "title": None, "legend": {} if len(lines) > 1 else None},
                "tooltip": tooltip(step="step", loss=f"{name} loss"),
            },
        }
        for name, line in lines.items()
    ]
    return chart("Loss over the steps", 200, layer=layers)


def _line(columns: Columns, field: str, name: str, names: list[str], axis: Spec) -> Spec:
    scale = {"domain": names, "range": [_SERIES[name] for name in names]}
    return {
        "data": inline_csv({"step": columns["step"], field: columns[field]}),
        "mark": {"type": "line", "strokeWidth": 1.5, "point": len(columns["step"]) < 12},
        "encoding": {
            "x": x_of("step", "step", axis=axis, scale={"nice": False, "zero": False}),
            "y": y_of(field, "seconds", scale={"zero": True}),
            "color": {"datum": name, "scale": scale, "title": None, "legend": {"columns": 2}},
        },
    }


# Meaning of a line in a Gantt chart -> dash pattern; colours stand for degrees.
_ENDS = {
    "bound": [2, 3],
    "planned end": [7, 3],
    "measured end": [1, 0],
    "this plan ends": [1, 0],
    "static ends": [7, 3],
}


def gantt_chart(
    bars: Columns, ends: Columns, colours: DegreeColours, *, shown: RanksShown, first: int | None = None
) -> Spec:
    """Draw a Gantt chart of a step (ranks over time), with lines at end times.

    Args:
        bars: rectangles of one step, or of all selectable steps.
        ends: times of lines, labelled by `what`; charts with equal `ends` share a time axis.
        colours: colours of degrees.
        shown: ranks in `bars`.
        first: initially selected step; the page parameter `chosen` then selects. None: there is a single step.
    """
    chosen = [{"filter": "datum.step == chosen"}] if first is not None else []
    rectangles = {
        "data": inline_csv(colours.with_labels(bars)),
        "transform": [*chosen, {"calculate": "datum.end - datum.start", "as": "seconds"}],
        "mark": {"type": "rect", "stroke": "currentColor", "strokeOpacity": 0.3, "strokeWidth": 0.4, "aria": False},
        "encoding": {
            "x": x_of(
                "start",
                "seconds from the start of the step",
                scale={"nice": False, "zero": True},
                axis={"grid": False, "tickCount": 8},
            ),
            "x2": {"field": "end"},
            "y": y_of("rank", "rank", scale=_rows(shown.count), axis=shown.axis(16)),
            "y2": {"field": "top"},
            "color": colours.encoding(),
            "tooltip": [
                *tooltip(order="micro-batch", degree="degree", tokens="tokens"),
                *(tooltip(heads="ranks that share heads") if "heads" in bars else []),
                *({"field": f, "title": f, "type": "quantitative", "format": ".4f"} for f in ("start", "seconds")),
            ],
        },
    }
    return chart(
        "Gantt chart of one step: ranks over time, coloured by degree",
        min(640, max(120, 14 * shown.count)),
        layer=[rectangles, *_node_rules(shown), _end_rules(ends, chosen)],
        **({"params": [{"name": "chosen", "value": first}]} if first is not None else {}),
    )


def _node_rules(shown: RanksShown) -> list[Spec]:
    lines = [{"row": row} for row in shown.node_lines()]
    if not lines:
        return []
    mark = {"type": "rule", "color": "currentColor", "strokeWidth": 1, "opacity": 0.45, "aria": False}
    return [{"data": {"values": lines}, "mark": mark, "encoding": {"y": {"field": "row", "type": "quantitative"}}}]


def _end_rules(ends: Columns, chosen: list[Spec]) -> Spec:
    names = [name for name in _ENDS if name in ends["what"]]
    return {
        "data": inline_csv(ends),
        "transform": chosen,
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "at", "type": "quantitative"},
            "strokeDash": {
                "field": "what",
                "type": "nominal",
                "title": None,
                "scale": {"domain": names, "range": [_ENDS[name] for name in names]},
                "legend": {
                    "symbolType": "stroke",
                    "symbolSize": 500,
                    "symbolStrokeColor": "currentColor",
                    "orient": "bottom",  # next to the degrees, a phone would cut it off
                },
            },
            "tooltip": [{"field": "what"}, {"field": "at"}],
        },
    }


def _rows(count: int) -> Spec:
    return {"domain": [0, count], "nice": False, "reverse": True}


def largest_idle(*maps: Columns) -> float:
    """Return the idle share drawn in full colour, at least 10 %, so that small idle shares look small."""
    return max(0.1, *(float(np.max(np.asarray(cells["idle"]))) for cells in maps))


def heat_chart(cells: Columns, *, ranks: RanksShown, most: float) -> Spec:
    """Draw the idle share per rank and step; busy cells stay blank.

    Args:
        cells: cells of the heat map.
        ranks: ranks of the job.
        most: idle share in full colour, from `largest_idle`.
    """
    numbers = np.unique(np.asarray(cells["step"], dtype=np.float64))
    middles = [float(step) + 0.5 for step in numbers[:: max(1, -(-len(numbers) // 8))]]  # ticks amid existing steps
    steps = {"grid": False, "values": middles, "labelExpr": "format(floor(datum.value), ',')", "ticks": False}
    return chart(
        "Heat map of idle time: ranks over steps",
        min(260, max(110, 12 * ranks.num_ranks)),
        data=inline_csv(cells),
        mark={"type": "rect", "aria": False},  # a screen reader would read thousands of cells
        encoding={
            "x": x_of("step", "step", scale={"nice": False, "zero": False}, axis=steps),
            "x2": {"field": "step_end"},
            "y": y_of("rank", "rank", scale=_rows(ranks.num_ranks), axis=ranks.axis(8)),
            "y2": {"field": "rank_end"},
            "color": {"value": MEASURED},
            "fillOpacity": {
                "field": "idle",
                "type": "quantitative",
                "scale": {"domain": [0, most], "range": [0, 1]},
                "legend": None,  # the page has one legend for all maps
            },
            "tooltip": [*tooltip(step="from step", rank="from rank"), percent("idle", "idle")],
        },
        view={"stroke": "currentColor", "strokeOpacity": 0.3},
    )


def length_chart(bars: Columns, boundaries: Columns, colours: DegreeColours) -> Spec:
    """Plot the length histogram by degree, with the maximum length of each degree."""
    scale = {"type": "log", "base": 2, "nice": False}
    rectangles = {
        "data": inline_csv(colours.with_labels(bars)),
        "mark": {"type": "rect", "stroke": "currentColor", "strokeOpacity": 0.25, "strokeWidth": 0.4},
        "encoding": {
            "x": x_of(
                "shortest",
                "length in tokens",
                scale=scale,
                axis={"format": ",.0f", "labelOverlap": True, "grid": False},
            ),
            "x2": {"field": "longest"},
            "y": y_of("bottom", "sequences"),
            "y2": {"field": "top"},
            "color": colours.encoding(),
            "tooltip": [
                {"field": "shortest", "title": "from tokens", "type": "quantitative", "format": ",.0f"},
                *tooltip(degree="degree", sequences="sequences"),
            ],
        },
    }
    at = {"field": "tokens", "type": "quantitative"}
    rules = {
        "data": inline_csv(boundaries),
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7}, "encoding": {"x": at}},
            {
                "mark": {"type": "text", "align": "left", "baseline": "top", "dx": 3, "fontSize": 10},
                "encoding": {"x": at, "y": {"value": 0}, "text": {"field": "label"}},
            },
        ],
    }
    return chart("Histogram of sequence lengths by degree", 240, layer=[rectangles, rules])


def mix_chart(mix: Columns, colours: DegreeColours) -> Spec:
    """Plot each degree's share of micro-batches, tokens and rank-seconds."""
    return chart(
        "Share of each degree in micro-batches, tokens and rank-seconds",
        110,
        data=inline_csv(colours.with_labels(mix)),
        mark={"type": "bar", "stroke": "currentColor", "strokeOpacity": 0.25, "strokeWidth": 0.4},
        encoding={
            "x": x_of(
                "share", "share", aggregate="sum", axis={"format": ".0%", "tickCount": 10}, scale={"domain": [0, 1]}
            ),
            "y": {"field": "measure", "type": "nominal", "title": None, "sort": None},
            "color": colours.encoding(),
            "order": {"field": "degree", "type": "quantitative"},
            "detail": {"field": "degree"},
            "tooltip": [*tooltip(measure="of", degree="degree"), percent("share", "share")],
        },
    )


def memory_chart(bars: Columns, *, most: float, unit: str, ranks: RanksShown) -> Spec:
    """Plot peak memory per rank against its limit: planned as bars, measured as dashes.

    Args:
        bars: `rank`, `rank_end`, `most`, and optionally `measured`.
        most: limit: device memory, or the token budget.
        unit: unit of both.
        ranks: ranks of the job.
    """
    x = {"scale": {"domain": [0, ranks.num_ranks], "nice": False}, "axis": ranks.axis(8)}
    planned = {
        "mark": {"type": "rect", "color": PLANNED, "stroke": None},
        "encoding": {
            "x": x_of("rank", "rank", **x),
            "x2": {"field": "rank_end"},
            "y": y_of("most", unit, axis={"format": ",~r", "tickCount": 5}),
            "y2": {"datum": 0},
            "tooltip": tooltip(rank="rank", most=f"planned {unit}"),
        },
    }
    measured = {
        "mark": {"type": "rule", "color": MEASURED, "strokeWidth": 3},
        "encoding": {
            "x": x_of("rank", "rank", **x),
            "x2": {"field": "rank_end"},
            "y": y_of("measured", unit),
            "tooltip": tooltip(rank="rank", measured=f"measured {unit}"),
        },
    }
    rule = {
        "data": {"values": [{"budget": most}]},
        "mark": {"type": "rule", "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "budget", "type": "quantitative"}, "tooltip": [{"field": "budget"}]},
    }
    layers = [planned, *([measured] if "measured" in bars else []), rule]
    return chart("Peak memory of each rank, against its limit", 180, data=inline_csv(bars), layer=layers)


def scatter_chart(points: Columns, colours: DegreeColours) -> Spec:
    """Plot predicted against measured seconds per micro-batch; the dashed line marks equality."""
    planned, measured = np.asarray(points["planned"]), np.asarray(points["measured"])
    low, high = float(min(planned.min(), measured.min())), float(max(planned.max(), measured.max()))
    scale = {"type": "log", "nice": False, "domain": [low * 0.9, high * 1.1]}
    dots = {
        "data": inline_csv(colours.with_labels(points)),
        "mark": {"type": "point", "filled": True, "size": 14 if len(planned) > 300 else 36, "opacity": 0.7},
        "encoding": {
            "x": x_of("planned", "predicted seconds", scale=scale, axis={"labelOverlap": True}),
            "y": y_of("measured", "measured seconds", scale=scale, axis={"labelOverlap": True}),
            "color": colours.encoding(),
            "tooltip": tooltip(degree="degree", planned="predicted s", measured="measured s"),
        },
    }
    diagonal = {
        "data": {"values": [{"planned": low, "measured": low}, {"planned": high, "measured": high}]},
        "mark": {"type": "line", "color": "currentColor", "strokeDash": [4, 3], "strokeWidth": 1},
        "encoding": {"x": x_of("planned", "predicted seconds"), "y": y_of("measured", "measured seconds")},
    }
    return chart("Predicted against measured seconds of each micro-batch", 300, layer=[dots, diagonal])


Charts = Iterator[tuple[str, Spec]]
"""(element id, chart) pairs of a page."""
_GAIN_HEIGHT = 210


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Predicted gain over the best static plan.

    Attributes:
        factor: None if unknown; `remark` says why.
        remark: description of the comparison.
        ours, static: a typical step as planned, and under the static degree.
    """

    factor: float | None
    remark: str
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
    yield "chart-steps", step_chart(plan.step_series(), step_times)
    if run is not None and (losses := run.losses()) is not None:
        yield "chart-loss", loss_chart(losses, run.held_out_losses())
    yield from _inside_a_step(plan, run, colours)
    maps, most = idle_maps(plan, run)
    for place, cells in maps.items():
        yield place, heat_chart(cells, ranks=everyone, most=most)
    budget, tokens = plan.metadata.tokens_per_rank, plan.degree_boundaries()
    boundaries: Columns = {"tokens": tokens, "label": [str(each // budget) for each in tokens.tolist()]}
    yield "chart-lengths", length_chart(plan.length_bars(), boundaries, colours)
    yield "chart-mix", mix_chart(_mix(plan), colours)
    yield "chart-memory", _memory(plan, run, everyone)
    if measured is not None:
        yield "chart-scatter", scatter_chart(measured.scatter(), colours)


def idle_maps(plan: PlanPicture, run: RunPicture | None) -> tuple[dict[str, Columns], float]:
    """Return the planned and measured idle maps, and the idle share drawn in full colour."""
    maps = {"chart-heat": plan.heat.cells()}
    if run is not None and has_measured_steps(run):
        maps["chart-waited"] = run.heat.cells()
    return maps, largest_idle(*maps.values())


def _gain(plan: PlanPicture, ours: StepPlan, static: StepPlan, colours: DegreeColours) -> Charts:
    """Yield the charts of a step under the best static degree and as planned, on a common time axis."""
    # Both charts get both lines, so that they have the same axis.
    at = [ours.makespan_seconds, static.makespan_seconds]
    ends: Columns = {"at": np.array(at), "what": ["this plan ends", "static ends"]}
    for place, step in (("chart-static", static), ("chart-ours", ours)):
        bars = bars_of(step, plan.shown, plan.metadata)
        chart = gantt_chart(bars, ends, colours, shown=plan.shown)
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
    yield "chart-gantt", gantt_chart(joined([*chosen.values()]), ends, colours, **options)
    if run is not None and run.bars:
        yield "chart-measured", gantt_chart(joined([*run.bars.values()]), ends, colours, **options)


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
        return memory_chart(bars, most=metadata.tokens_per_rank, unit="tokens", ranks=ranks)
    most = np.asarray(bars["most"], dtype=np.float64)
    bars["most"] = np.array([memory.total_bytes(tokens) / 1e9 for tokens in most.tolist()])
    if run is not None and run.peak_bytes.any():
        pairs = zip(np.asarray(bars["rank"]).tolist(), np.asarray(bars["rank_end"]).tolist(), strict=True)
        bars["measured"] = np.array([run.peak_bytes[first:end].max() / 1e9 for first, end in pairs])
    return memory_chart(bars, most=capacity / 1e9, unit="GB", ranks=ranks)
