"""Bars for the terminal."""

from __future__ import annotations


def bar(share: float, columns: int, *, ascii_only: bool = False) -> str:
    """Return a bar of at most `columns` columns, in eighths of one; whatever is not zero shows."""
    share = max(0.0, min(share, 1.0))
    eighths = max(round(share * columns * 8), 1 if share > 0 else 0)
    if ascii_only:
        return "#" * -(-eighths // 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
