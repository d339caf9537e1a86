"""The pictures of the study."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from benchmarks import picture
from benchmarks.study.parts import Study
from benchmarks.study.published import CLAIMS, EXTREME_SPEEDUP, SCALING_SPEEDUPS, Encoder
from benchmarks.study.runs import OURS, PAPER, STANDARD, STATIC, SYNCS, Cell
from fcp_cli.report import charts

_ENCODERS: Mapping[Encoder, str] = {
    "text": "text",
    "trained": "clips, encoder trained",
    "frozen": "clips, encoder frozen",
}
# Mark of the chart -> (strategy, over which), under microbatch.
_RATIOS = {
    "fcp over standard packing": (OURS, STANDARD),
    "fcp over static": (OURS, STATIC),
    "fcp-paper over standard packing": (PAPER, STANDARD),
}
_MEASURED = "papers (measured)"


def specs(study: Study) -> dict[str, Any]:
    """Vega-Lite specifications by file name."""
    return {
        "study-speedups.svg": _speedups(study),
        "study-scaling.svg": _scaling(study),
        "study-extreme.svg": _extreme(study),
    }


def _speedups(study: Study) -> charts.Spec:
    """A panel per cluster and encoder, a dot per model."""
    clusters = dict.fromkeys(cell.setting.cluster for cell in study.grid)
    most = max(_most(study.grid), *(claim.highest for claim in CLAIMS.values()))
    rows = []
    for cluster in clusters:
        panels = [_dots(study.grid, cluster, encoder, most) for encoder in _ENCODERS]
        rows.append({"hconcat": panels, "spacing": 20})
    return {"vconcat": rows, "spacing": 24}


def _most(cells: list[Cell]) -> float:
    return max(cell.speedup("microbatch", of=of, over=over) for cell in cells for of, over in _RATIOS.values())


def _dots(cells: list[Cell], cluster: str, encoder: Encoder, most: float) -> charts.Spec:
    chosen = [cell for cell in cells if (cell.setting.cluster, cell.setting.encoder) == (cluster, encoder)]
    rows = [
        (cell.setting.dataset, name, cell.speedup("microbatch", of=of, over=over))
        for (name, (of, over)), cell in product(_RATIOS.items(), chosen)
    ]
    claim = CLAIMS.get((cluster, encoder))
    rows += [(dataset, _MEASURED, value) for (_, dataset), value in (claim.bars.items() if claim else ())]
    datasets, names, values = zip(*rows, strict=True)
    marks = [*_RATIOS, _MEASURED]
    scale = {"domain": marks, "range": list(picture.COLOURS)}
    order = list(dict.fromkeys(cell.setting.dataset for cell in chosen))
    dots = {
        "data": charts.inline_csv({"dataset": list(datasets), "mark": list(names), "value": np.array(values)}),
        "mark": {"type": "point", "filled": True, "size": 30, "opacity": 0.85},
        "encoding": {
            "y": {"field": "dataset", "type": "nominal", "title": None, "sort": order},
            "yOffset": {"field": "mark", "type": "nominal", "sort": marks},
            "x": {
                "field": "value",
                "type": "quantitative",
                "title": "times quicker",
                "scale": {"domain": [0.75, most * 1.02], "nice": False},
                "axis": {"tickCount": 5},
            },
            "color": {"field": "mark", "type": "nominal", "title": None, "scale": scale},
            "shape": {
                "field": "mark",
                "type": "nominal",
                "title": None,
                "scale": {"domain": marks, "range": ["circle", "circle", "circle", "diamond"]},
            },
        },
    }
    one = {"data": {"values": [{"at": 1.0}]}, "mark": {"type": "rule", "strokeDash": [4, 3]}}
    one["encoding"] = {"x": {"field": "at", "type": "quantitative"}}
    spec = picture.sized({"layer": [dots, one]}, 190, f"{cluster}: {_ENCODERS[encoder]}")
    return {**spec, "width": 225}


def _scaling(study: Study) -> charts.Spec:
    def curve(of: str, over: str) -> list[tuple[float, float]]:
        return [(cell.setting.ranks, cell.speedup("microbatch", of=of, over=over)) for cell in study.scaling]

    def share(name: str) -> list[tuple[float, float]]:
        outcomes = [
            (cell.setting.ranks, cell.outcomes[name, "microbatch"])
            for cell in study.scaling
            if (name, "microbatch") in cell.outcomes
        ]
        return [(ranks, 100 * one.planning_seconds / one.step_seconds) for ranks, one in outcomes]

    speedups: dict[str, list[tuple[float, float]]] = {
        "fcp over standard packing": curve(OURS, STANDARD),
        "fcp over static": curve(OURS, STATIC),
        "papers over DeepSpeed": list(SCALING_SPEEDUPS.items()),
    }
    planning = {"fcp": share(OURS), "fcp-paper": share(PAPER)}
    panels = [
        picture.curves_spec("times quicker", speedups, False),
        picture.curves_spec("planning, % of the step it plans", planning, False),
    ]
    return {"hconcat": panels, "spacing": 40, "resolve": {"scale": {"color": "independent"}}}


def _extreme(study: Study) -> charts.Spec:
    panels = []
    for cluster in dict.fromkeys(one.cluster for one in study.extremes):
        curves = {
            f"over {over}: {sync}": [
                (one.short, one.speedups(over=over)[at]) for one in study.extremes if one.cluster == cluster
            ]
            for over, (at, sync) in product((STANDARD, STATIC), enumerate(SYNCS))
        }
        chart = picture.curves_spec(cluster, curves, False, over="sequences of 2k to 8k beside one of 128k")
        chart["encoding"]["color"]["legend"] = {"columns": 2, "labelLimit": 300}
        panels.append(_with_rule(chart, EXTREME_SPEEDUP, "FCP paper, measured"))
    return {"hconcat": panels, "spacing": 40}


def _with_rule(chart: charts.Spec, at: float, label: str) -> charts.Spec:
    """A chart with a dashed line across it."""
    inner = {key: chart.pop(key) for key in ("data", "mark", "encoding")}
    value = {"values": [{"at": at, "label": label}]}
    y = {"field": "at", "type": "quantitative"}
    rule = {"data": value, "mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"y": y}}
    words = {
        "data": value,
        "mark": {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -2},
        "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "label"}},
    }
    return {**chart, "layer": [inner, rule, words]}
