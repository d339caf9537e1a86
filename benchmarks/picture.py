"""Growth curves as an SVG: one panel per figure, ranks on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Curves = Mapping[str, Sequence[tuple[float, float]]]  # label -> (ranks, value)

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 220, 60, 40, 90
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")


def write_growth(path: Path, panels: Mapping[str, tuple[Curves, bool]]) -> None:
    """Write one picture: panels are title -> (curves, whether the value axis is logarithmic)."""
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12" fill="#57606a">'
    ]
    for number, (title, (curves, logarithmic)) in enumerate(panels.items()):
        parts += _panel(title, curves, logarithmic, left=_LEFT + number * (_WIDTH + _GAP))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _panel(title: str, curves: Curves, logarithmic: bool, *, left: int) -> list[str]:
    ranks = sorted({x for points in curves.values() for x, _ in points})
    most = max(y for points in curves.values() for _, y in points)
    least = min(y for points in curves.values() for _, y in points)
    ticks = _ticks(least, most, logarithmic)
    low, high = ticks[0], ticks[-1]

    def x_of(rank: float) -> float:
        return left + _WIDTH * math.log2(rank / ranks[0]) / max(math.log2(ranks[-1] / ranks[0]), 1.0)

    def y_of(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
        return _TOP + _HEIGHT * (1.0 - share)

    parts = [f'<text x="{left}" y="{_TOP - 18}" font-size="14" fill="#24292f">{title}</text>']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{x_of(rank):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{rank:g}</text>'
        for rank in ranks[::2]
    ]
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">ranks</text>')
    for colour, (label, points) in zip(_COLOURS, curves.items(), strict=False):
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(f'<text x="{x_of(x) + 6:.1f}" y="{y_of(y) + 4:.1f}" fill="{colour}">{label}</text>')
    return parts


def _ticks(least: float, most: float, logarithmic: bool) -> list[float]:
    if logarithmic:
        return [10.0**k for k in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    step = 10.0 ** math.floor(math.log10(max(most, 1e-9)))
    step = step if most / step > 3 else step / 2
    return [k * step for k in range(math.ceil(most / step) + 1)]
