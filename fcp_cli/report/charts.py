"""The page's charts as Vega-Lite specifications.

Words and lines are drawn in `currentColor`, so that the page's style sheet alone decides between light, dark and
paper; data travels as CSV, which is half the size of JSON rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from fcp_cli.report.page_data import Columns

Spec = dict[str, Any]

# From calm to loud; every one has contrast 3:1 or so on white and on near-black.
_PALETTE = ("#7d93a6", "#3f8fd2", "#1fa08a", "#7aa52a", "#d09a1e", "#e0702e", "#c9487f", "#8a63d2")
_PLANNED, _MEASURED, _BOUND = "#3f8fd2", "#e0702e", "#1fa08a"

CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), "currentColor"),
        "gridOpacity": 0.13,
        "domainOpacity": 0.5,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "orient": "top",
        "titleOrient": "left",
        "titlePadding": 8,
        "titleFontWeight": "normal",
    },
    "rule": {"color": "currentColor"},
    "text": {"color": "currentColor"},
}


class DegreeColours:
    """One colour per degree, or per range of degrees where there are more than colours."""

    def __init__(self, degrees: Iterable[int]) -> None:
        found = sorted(set(degrees))
        if len(found) <= len(_PALETTE):
            self._labels = {degree: str(degree) for degree in found}
        else:
            self._labels = {degree: _range_label(degree, found[-1]) for degree in found}
        self.domain = list(dict.fromkeys(self._labels[degree] for degree in found))

    def with_labels(self, columns: Columns) -> Columns:
        """Return the columns with a `colour` for each line's degree."""
        degrees = np.asarray(columns["degree"]).tolist() if columns else []
        return {**columns, "colour": [self._labels.get(degree, self.domain[-1]) for degree in degrees]}

    def encoding(self) -> Spec:
        scale = {"domain": self.domain, "range": list(_PALETTE[: len(self.domain)])}
        legend = {"columns": 5}  # more in a row would be cut off on a phone
        return {"field": "colour", "type": "ordinal", "title": "degree", "scale": scale, "legend": legend}


def _range_label(degree: int, largest: int) -> str:
    """Return the range of a degree: 1, 2, 3-4, 5-8, ... and everything above 64 together."""
    exponent = (degree - 1).bit_length()
    if exponent >= len(_PALETTE) - 1:
        return f"{2 ** (len(_PALETTE) - 2) + 1}-{largest}"
    first, last = 2**exponent // 2 + 1, 2**exponent
    return str(degree) if degree <= 2 else f"{first}-{last}"


def inline_csv(columns: Columns) -> Spec:
    """Write a table as Vega's inline CSV; numbers to 5 digits, which is more than a screen has pixels."""
    texts = [
        [(f"{value:.5g}" if isinstance(value, float) else str(value)) for value in np.asarray(column).tolist()]
        for column in columns.values()
    ]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([list(columns), *zip(*texts, strict=True)])
    numbers = {name: "number" for name, column in columns.items() if not isinstance(column, list)}
    return {"values": table.getvalue(), "format": {"type": "csv", "parse": numbers}}


def _x(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


_y = _x


def _tooltip(**fields: str) -> list[Spec]:
    return [{"field": field, "title": title} for field, title in fields.items()]


def _chart(description: str, height: int, **parts: Any) -> Spec:
    return {"description": description, "width": "container", "height": height, **parts}


def step_chart(series: Columns, drift: Columns | None) -> Spec:
    """Draw planned seconds, lower bound and measured seconds over the steps."""
    names = [name for name in _SERIES if name != "measured" or drift is not None]
    lines = [_line(series, "planned", "planned", names), _line(series, "bound", "lower bound", names)]
    lines[1]["mark"]["strokeDash"] = [5, 5]  # a good plan lies on its bound; dashed, both show
    if drift is not None:
        lines.append(_line(drift, "seconds", "measured", names))
    return _chart("Step time over the steps of the plan", 200, layer=lines)


_SERIES = {"planned": _PLANNED, "lower bound": _BOUND, "measured": _MEASURED}


def _line(columns: Columns, field: str, name: str, names: list[str]) -> Spec:
    scale = {"domain": names, "range": [_SERIES[name] for name in names]}
    return {
        "data": inline_csv({"step": columns["step"], field: columns[field]}),
        "mark": {"type": "line", "strokeWidth": 1.5, "point": len(columns["step"]) < 12},
        "encoding": {
            "x": _x("step", "step", axis={"tickMinStep": 1}, scale={"nice": False, "zero": False}),
            "y": _y(field, "seconds", scale={"zero": True}),
            "color": {"datum": name, "scale": scale, "title": None},
        },
    }


# What the lines of a Gantt chart mark -> their dashes; the colours are taken by the degrees.
_ENDS = {"lower bound": [2, 3], "planned end": [7, 3], "measured end": [1, 0]}


def gantt_chart(
    bars: Columns, ends: Columns, colours: DegreeColours, *, num_ranks: int, first: int | None = None
) -> Spec:
    """Draw rank x time of one step.

    Args:
        bars: rectangles of one step, or of all that can be chosen.
        ends: where to draw lines, and `what` each of them is; charts of one step share a time axis if they share these.
        first: the step to begin with; the page's parameter `chosen` then names the one to draw. None: the only one.
    """
    chosen = [{"filter": "datum.step == chosen"}] if first is not None else []
    rectangles = {
        "data": inline_csv(colours.with_labels(bars)),
        "transform": [*chosen, {"calculate": "datum.end - datum.start", "as": "seconds"}],
        "mark": {"type": "rect", "stroke": "currentColor", "strokeOpacity": 0.35, "strokeWidth": 0.5},
        "encoding": {
            "x": _x("start", "seconds from the start of the step", scale={"nice": False, "zero": True}),
            "x2": {"field": "end"},
            "y": _y("rank", "rank", scale=_ranks(num_ranks), axis={"tickMinStep": 1, "grid": False}),
            "y2": {"field": "top"},
            "color": colours.encoding(),
            "tooltip": [
                *_tooltip(order="micro-batch", degree="degree", tokens="tokens"),
                *({"field": f, "title": f, "type": "quantitative", "format": ".4f"} for f in ("start", "seconds")),
            ],
        },
    }
    return _chart(
        "Gantt chart of one step: ranks over time, coloured by degree",
        min(640, max(140, 14 * num_ranks)),
        layer=[rectangles, _end_rules(ends, chosen)],
        **({"params": [{"name": "chosen", "value": first}]} if first is not None else {}),
    )


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
                    "orient": "bottom",  # beside the degrees it would be cut off on a phone
                },
            },
            "tooltip": [{"field": "what"}, {"field": "at"}],
        },
    }


def _ranks(num_ranks: int) -> Spec:
    return {"domain": [0, num_ranks], "nice": False, "reverse": True}


def heat_chart(cells: Columns, *, num_ranks: int) -> Spec:
    """Draw the idle share per rank and step."""
    ranks = {"scale": _ranks(num_ranks), "axis": {"tickMinStep": 1, "grid": False}}
    return _chart(
        "Heat map of idle time: ranks over steps",
        min(420, max(120, 12 * num_ranks)),
        data=inline_csv(cells),
        mark={"type": "rect", "aria": False},  # thousands of cells would bury the rest of the page for a screen reader
        encoding={
            "x": _x("step", "step", scale={"nice": False, "zero": False}, axis={"tickMinStep": 1, "grid": False}),
            "x2": {"field": "step_end"},
            "y": _y("rank", "rank", **ranks),
            "y2": {"field": "rank_end"},
            "color": {
                "field": "idle",
                "type": "quantitative",
                "title": "idle share",
                # Never stretched over less than 10 %: a plan that hardly waits should show it.
                "scale": {"scheme": "viridis", "domain": [0, max(0.1, float(np.max(np.asarray(cells["idle"]))))]},
                "legend": {"format": ".1%", "gradientLength": 180},
            },
            "tooltip": [*_tooltip(step="from step", rank="from rank"), _percent("idle", "idle")],
        },
    )


def _percent(field: str, title: str) -> Spec:
    return {"field": field, "title": title, "type": "quantitative", "format": ".2%"}


def length_chart(bars: Columns, boundaries: Columns, colours: DegreeColours) -> Spec:
    """Draw how long the sequences are, their degrees, and from where on a degree no longer holds them."""
    scale = {"type": "log", "base": 2, "nice": False}
    rectangles = {
        "data": inline_csv(colours.with_labels(bars)),
        "mark": {"type": "rect", "stroke": "currentColor", "strokeOpacity": 0.25, "strokeWidth": 0.4},
        "encoding": {
            "x": _x(
                "shortest",
                "length in tokens",
                scale=scale,
                axis={"format": ",.0f", "labelOverlap": True, "grid": False},
            ),
            "x2": {"field": "longest"},
            "y": _y("bottom", "sequences"),
            "y2": {"field": "top"},
            "color": colours.encoding(),
            "tooltip": [
                {"field": "shortest", "title": "from tokens", "type": "quantitative", "format": ",.0f"},
                *_tooltip(degree="degree", sequences="sequences"),
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
    return _chart("Histogram of sequence lengths by degree", 240, layer=[rectangles, rules])


def mix_chart(mix: Columns, colours: DegreeColours) -> Spec:
    """Draw the shares of each degree in micro-batches, tokens and rank-seconds."""
    return _chart(
        "Share of each degree in micro-batches, tokens and rank-seconds",
        110,
        data=inline_csv(colours.with_labels(mix)),
        mark={"type": "bar", "stroke": "currentColor", "strokeOpacity": 0.25, "strokeWidth": 0.4},
        encoding={
            "x": _x(
                "share", "share", aggregate="sum", axis={"format": ".0%", "tickCount": 10}, scale={"domain": [0, 1]}
            ),
            "y": {"field": "measure", "type": "nominal", "title": None, "sort": None},
            "color": colours.encoding(),
            "order": {"field": "degree", "type": "quantitative"},
            "detail": {"field": "degree"},
            "tooltip": [*_tooltip(measure="of", degree="degree"), _percent("share", "share")],
        },
    )


def memory_chart(bars: Columns, *, tokens_per_rank: int, num_ranks: int) -> Spec:
    """Draw the most tokens that each rank holds in one micro-batch, against the token budget."""
    rectangles = {
        "data": inline_csv(bars),
        "mark": {"type": "rect", "color": _PLANNED},
        "encoding": {
            "x": _x(
                "rank", "rank", scale={"domain": [0, num_ranks], "nice": False}, axis={"tickMinStep": 1, "grid": False}
            ),
            "x2": {"field": "rank_end"},
            "y": _y("most", "most tokens held"),
            "y2": {"datum": 0},
            "tooltip": _tooltip(rank="rank", most="tokens"),
        },
    }
    rule = {
        "data": {"values": [{"budget": tokens_per_rank}]},
        "mark": {"type": "rule", "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "budget", "type": "quantitative"}, "tooltip": [{"field": "budget"}]},
    }
    return _chart("Most tokens held by each rank against the token budget", 160, layer=[rectangles, rule])


def scatter_chart(points: Columns, colours: DegreeColours) -> Spec:
    """Draw predicted against measured seconds per micro-batch; on the dashed line the prediction is right."""
    planned, measured = np.asarray(points["planned"]), np.asarray(points["measured"])
    low, high = float(min(planned.min(), measured.min())), float(max(planned.max(), measured.max()))
    scale = {"type": "log", "nice": False, "domain": [low * 0.9, high * 1.1]}
    dots = {
        "data": inline_csv(colours.with_labels(points)),
        "mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.6},
        "encoding": {
            "x": _x("planned", "predicted seconds", scale=scale, axis={"labelOverlap": True}),
            "y": _y("measured", "measured seconds", scale=scale, axis={"labelOverlap": True}),
            "color": colours.encoding(),
            "tooltip": _tooltip(degree="degree", planned="predicted s", measured="measured s"),
        },
    }
    diagonal = {
        "data": {"values": [{"planned": low, "measured": low}, {"planned": high, "measured": high}]},
        "mark": {"type": "line", "color": "currentColor", "strokeDash": [4, 3], "strokeWidth": 1},
        "encoding": {"x": _x("planned", "predicted seconds"), "y": _y("measured", "measured seconds")},
    }
    return _chart("Predicted against measured seconds of each micro-batch", 320, layer=[dots, diagonal])


def residual_chart(quantiles: Columns) -> Spec:
    """Draw the spread of measured / predicted - 1 per degree."""
    x = {"field": "degree", "type": "ordinal", "title": "degree", "axis": {"labelAngle": 0, "labelOverlap": True}}
    y = _y("p10", "measured / predicted - 1", axis={"format": "+.0%"}, scale={"zero": True})
    tooltip = [*_tooltip(degree="degree", micro_batches="micro-batches"), _percent("median", "median")]
    return _chart(
        "Residuals of the predicted seconds per degree: 10th to 90th percentile, quartiles and median",
        220,
        data=inline_csv(quantiles),
        layer=[
            {"mark": {"type": "rule", "opacity": 0.6}, "encoding": {"x": x, "y": y, "y2": {"field": "p90"}}},
            {
                "mark": {"type": "bar", "color": _PLANNED, "size": 10},
                "encoding": {"x": x, "y": {**y, "field": "p25"}, "y2": {"field": "p75"}, "tooltip": tooltip},
            },
            {
                "mark": {"type": "point", "filled": True, "color": _MEASURED, "size": 45, "opacity": 1},
                "encoding": {"x": x, "y": {**y, "field": "median"}, "tooltip": tooltip},
            },
        ],
    )


def drift_chart(drift: Columns) -> Spec:
    """Draw measured / predicted over the steps, for whole steps and for micro-batches alone."""
    names = {"whole": "whole step", "micro_batches": "micro-batches"}
    scale = {"domain": list(names.values()), "range": [_MEASURED, _PLANNED]}
    lines = [
        {
            "data": inline_csv({"step": drift["step"], field: drift[field]}),
            "mark": {"type": "line", "strokeWidth": 1.5, "point": len(drift["step"]) < 12},
            "encoding": {
                "x": _x("step", "step", axis={"tickMinStep": 1}, scale={"nice": False, "zero": False}),
                "y": _y(field, "measured / predicted", scale={"zero": False}),
                "color": {"datum": name, "scale": scale, "title": None},
            },
        }
        for field, name in names.items()
    ]
    one = {"data": {"values": [{"at": 1.0}]}, "mark": {"type": "rule", "strokeDash": [4, 3]}}
    rule = {**one, "encoding": {"y": {"field": "at", "type": "quantitative"}}}
    return _chart("Measured time over predicted time along the run", 200, layer=[*lines, rule])


def slowest_chart(ranks: Columns) -> Spec:
    """Draw the ranks that took longest for their work."""
    return _chart(
        "The slowest ranks: measured over predicted seconds of their micro-batches",
        30 + 18 * len(ranks["rank"]),
        data=inline_csv(ranks),
        mark={"type": "bar", "color": _MEASURED},
        encoding={
            "y": {"field": "rank", "type": "ordinal", "sort": {"field": "place"}, "title": "rank"},
            "x": _x("ratio", "measured / predicted"),
            "tooltip": [
                *_tooltip(rank="rank"),
                {"field": "ratio", "title": "ratio", "type": "quantitative", "format": ".3f"},
            ],
        },
    )
