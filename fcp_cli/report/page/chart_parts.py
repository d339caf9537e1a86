"""Common parts of the page's charts: colours, the data format, axes.

Words and lines are drawn in `currentColor`, so that the page's style sheet alone decides between light, dark and
paper; data travels as CSV, which is half the size of JSON rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from fcp_cli.report.page.page_data import Columns

Spec = dict[str, Any]

# Small degrees are blue and large ones warm, each darker than the one before: colour-blind readers tell them apart.
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
    """One colour per degree, or per range of degrees if there are more than colours."""

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

    def encoding(self, shown: Iterable[int] | None = None) -> Spec:
        """Return the colour of a mark; a legend of these degrees alone, of none, or of all where None is given."""
        scale = {"domain": self.domain, "range": list(_PALETTE[: len(self.domain)])}
        wanted = sorted({*self._labels} if shown is None else {*shown} & {*self._labels})
        values = list(dict.fromkeys(self._labels[degree] for degree in wanted))
        lines = -(-len(values) // 5)  # more in a row would be cut off on a phone
        legend = {"columns": -(-len(values) // lines), "values": values} if values else None
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


def x_of(field: str, title: str, **more: Any) -> Spec:
    """Encode a field along an axis."""
    return {"field": field, "type": "quantitative", "title": title, **more}


y_of = x_of


def tooltip(**fields: str) -> list[Spec]:
    """List fields with their titles."""
    return [{"field": field, "title": title} for field, title in fields.items()]


def chart(description: str, height: int, **parts: Any) -> Spec:
    """Begin a chart that is as wide as its place."""
    return {"description": description, "width": "container", "height": height, **parts}


def percent(field: str, title: str) -> Spec:
    """Show a share in a tooltip."""
    return {"field": field, "title": title, "type": "quantitative", "format": ".2%"}


def steps_axis(steps: Columns) -> Spec:
    """Return an axis whose ticks are steps that there are; `steps` has a column `step`."""
    column = np.asarray(steps["step"], dtype=np.float64)
    first, last = int(column.min()), int(column.max())
    return {"values": list(range(first, last + 1, -(-(last + 1 - first) // 8))), "format": ",d", "grid": False}
