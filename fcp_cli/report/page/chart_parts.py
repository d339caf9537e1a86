"""Shared parts of the page's charts: colours, data format, axes.

Text and lines use `currentColor`, so that the style sheet alone controls light, dark and print themes. Data is inlined
as CSV, which is half the size of JSON rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from fcp_cli.report.page.page_data import Columns

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
