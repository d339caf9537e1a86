"""The page's charts of how well a run was predicted."""

from __future__ import annotations

import numpy as np

from fcp_cli.report.page.chart_parts import (
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


def scatter_chart(points: Columns, colours: DegreeColours) -> Spec:
    """Draw predicted against measured seconds per micro-batch; on the dashed line the prediction is right."""
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


def residual_chart(quantiles: Columns) -> Spec:
    """Draw the spread of measured / predicted - 1 per degree."""
    x = {"field": "degree", "type": "ordinal", "title": "degree", "axis": {"labelAngle": 0, "labelOverlap": True}}
    y = y_of("p10", "measured / predicted - 1", axis={"format": "+.0%"}, scale={"zero": True})
    tips = [*tooltip(degree="degree", micro_batches="micro-batches"), percent("median", "median")]
    return chart(
        "Residuals of the predicted seconds per degree: 10th to 90th percentile, quartiles and median",
        300,
        data=inline_csv(quantiles),
        layer=[
            {"mark": {"type": "rule", "opacity": 0.6}, "encoding": {"x": x, "y": y, "y2": {"field": "p90"}}},
            {
                "mark": {"type": "bar", "color": PLANNED, "size": 10},
                "encoding": {"x": x, "y": {**y, "field": "p25"}, "y2": {"field": "p75"}, "tooltip": tips},
            },
            {
                "mark": {"type": "point", "filled": True, "color": MEASURED, "size": 45, "opacity": 1},
                "encoding": {"x": x, "y": {**y, "field": "median"}, "tooltip": tips},
            },
        ],
    )


def drift_chart(drift: Columns) -> Spec:
    """Draw measured / predicted over the steps, for whole steps and for micro-batches alone."""
    names = {"whole": "whole step", "micro_batches": "micro-batches"}
    scale = {"domain": list(names.values()), "range": [MEASURED, PLANNED]}
    lines = [
        {
            "data": inline_csv({"step": drift["step"], field: drift[field]}),
            "mark": {"type": "line", "strokeWidth": 1.5, "point": len(drift["step"]) < 12},
            "encoding": {
                "x": x_of("step", "step", axis=steps_axis(drift), scale={"nice": False, "zero": False}),
                "y": y_of(field, "measured / predicted", scale={"zero": False}),
                "color": {"datum": name, "scale": scale, "title": None},
            },
        }
        for field, name in names.items()
    ]
    one = {"data": {"values": [{"at": 1.0}]}, "mark": {"type": "rule", "strokeDash": [4, 3]}}
    rule = {**one, "encoding": {"y": {"field": "at", "type": "quantitative"}}}
    return chart("Measured time over predicted time along the run", 260, layer=[*lines, rule])


def slowest_chart(ranks: Columns) -> Spec:
    """Draw the ranks that took longest for their work."""
    return chart(
        "The slowest ranks: measured over predicted seconds of their micro-batches",
        30 + 18 * len(ranks["rank"]),
        data=inline_csv(ranks),
        mark={"type": "bar", "color": MEASURED},
        encoding={
            "y": {"field": "rank", "type": "ordinal", "sort": {"field": "place"}, "title": "rank"},
            "x": x_of("ratio", "measured / predicted"),
            "tooltip": [
                *tooltip(rank="rank"),
                {"field": "ratio", "title": "ratio", "type": "quantitative", "format": ".3f"},
            ],
        },
    )
