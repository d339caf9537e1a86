"""Vega-Lite charts of a plan and of a run's measured steps."""

from __future__ import annotations

import numpy as np

from fcp_cli.report.page.chart_parts import (
    BOUND,
    MEASURED,
    PLANNED,
    DegreeColours,
    Spec,
    chart,
    inline_csv,
    percent,
    steps_axis,
    tooltip,
    x_of,
    y_of,
)
from fcp_cli.report.page.page_data import Columns
from fcp_cli.report.ranks_shown import RanksShown


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
    steps = {"grid": False, "values": _middles(cells), "labelExpr": "format(floor(datum.value), ',')", "ticks": False}
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


def _middles(cells: Columns) -> list[float]:
    """Return ticks at the middle of existing steps."""
    steps = np.unique(np.asarray(cells["step"], dtype=np.float64))
    return [float(step) + 0.5 for step in steps[:: max(1, -(-len(steps) // 8))]]


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
