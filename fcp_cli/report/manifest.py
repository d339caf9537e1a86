"""Prints a manifest's statistics and length histogram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fcp_cli.console import bar, print_table
from fcp_cli.manifest.table.summary import PICTURE_COUNTS, ManifestSummary
from fcp_cli.words import counted

if TYPE_CHECKING:
    from rich.console import Console

_BAR_CELLS: Final = 22
_BIN_COLUMNS: Final = 11  # width of the length range column
_SHARE_COLUMNS: Final = 10  # width of a percentage and the column gap


def print_manifest(
    console: Console, source: dict[str, Any] | None, summary: ManifestSummary, pictures: Mapping[str, int]
) -> None:
    """Print the statistics of a manifest and a histogram of its lengths."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_row("sequences", f"{summary.rows:,}")
    facts.add_row("tokens", f"{summary.tokens:,}")
    facts.add_row("length", f"min {summary.min_tokens:,}  mean {summary.mean_tokens:,.1f}  max {summary.max_tokens:,}")
    facts.add_row("", "  ".join(f"p{p:g} {length:,}" for p, length in summary.percentiles.items()))
    facts.add_row("longest 1 %", f"{summary.longest_percent_token_share:.1%} of all tokens")
    if pictures:
        facts.add_row("pictures", ", ".join(counted(count, PICTURE_COUNTS[name]) for name, count in pictures.items()))
    facts.add_row("source", _source_text(source))
    console.print(facts)
    room = console.width - _BIN_COLUMNS - 2 * _SHARE_COLUMNS
    bars = max(1, min(_BAR_CELLS, room // 2))
    print_table(console, _histogram(summary, bars, ascii_only=console.options.ascii_only))


def _source_text(source: dict[str, Any] | None) -> str:
    if source is None:
        return "not recorded: the file was not made by fcp manifest build"
    place = f"{source['kind']} {source['path']}"
    return f"{place}, tokens by {source['tokenizer']}" if source.get("tokenizer") else place


def _histogram(summary: ManifestSummary, bar_cells: int, *, ascii_only: bool) -> Any:
    from rich import box
    from rich.table import Table

    chart = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    chart.add_column("length", justify="right", no_wrap=True)
    for title in ("% of sequences", "% of tokens"):
        chart.add_column(title, no_wrap=True, min_width=7 + bar_cells)
    shares = [(span.sequences / summary.rows, span.tokens / summary.tokens) for span in summary.bins]
    largest = max(max(pair) for pair in shares)
    for span, pair in zip(summary.bins, shares, strict=True):
        bars = [f"{share:6.1%} {bar(share / largest, bar_cells, ascii_only=ascii_only)}" for share in pair]
        chart.add_row(f"{_short(span.from_tokens)} - {_short(span.to_tokens)}", *bars)
    return chart


def _short(tokens: int) -> str:
    """Format a power of two in binary units: 512, 4k, 2M."""
    for factor, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if tokens >= factor:
            return f"{tokens // factor}{letter}"
    return str(tokens)
