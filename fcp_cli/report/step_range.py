"""Reads `--steps A:B`, written like a Python slice."""

from __future__ import annotations

from fcp_cli.errors import UsageError


def parse_steps(text: str | None) -> range:
    """Read the steps `A` to before `B`; `A:` and `:B` are open, `A` alone is one step, None is all."""
    if text is None:
        return range(2**63 - 1)
    first, colon, last = text.partition(":")
    try:
        start = int(first or 0)
        stop = int(last) if last else 2**63 - 1 if colon else start + 1
    except ValueError:
        start, stop = 0, 0
    if start < 0 or stop <= start:
        raise UsageError(f"--steps is {text!r}; write A:B for the steps from A to before B, or one step")
    return range(start, stop)
