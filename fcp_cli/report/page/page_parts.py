"""HTML building blocks of the report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def figure(chart: str) -> str:
    """Return the container of a chart."""
    return f'<figure><div class="chart" id="{chart}"></div></figure>'


def part(title: str, caption: str, *charts: str, more: str = "") -> str:
    """Return charts under a level-3 heading."""
    return f"<div><h3>{html.escape(title)}</h3>{text(caption)}{''.join(map(figure, charts))}{more}</div>"


def section(title: str, caption: str, *content: str, name: str = "") -> str:
    """Return a section of the page."""
    mark = f' class="{name}"' if name else ""
    return f"<section{mark}><h2>{html.escape(title)}</h2>{text(caption)}{''.join(content)}</section>"


def side_by_side(*parts: str) -> str:
    """Lay parts out side by side on wide screens."""
    return f'<div class="pair">{"".join(parts)}</div>'


def seconds(value: float) -> str:
    """Format seconds with up to three decimals."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}\u00a0s"


def text(words: str) -> str:
    """Return a paragraph, or "" for empty text."""
    return f"<p>{html.escape(words)}</p>" if words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "") -> str:
    """Return a table; the first cell of a row is its header."""
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = (
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="scroll {name}"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a description list."""
    return (
        "<dl>" + "".join(f"<div><dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd></div>" for a, b in pairs) + "</dl>"
    )
