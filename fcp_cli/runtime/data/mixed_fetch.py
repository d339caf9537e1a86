"""Fetch sequences for a plan of a mixture, whose row numbers run through all sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.plan.file.reader import PlanReader


def mixed_fetch(plan: str | Path, fetch: Callable[[str, int], Any]) -> Callable[[int], Any]:
    """Return a session's `fetch`, given a function from a source and a row of it.

    Args:
        plan: a plan of `fcp plan --mix`.
        fetch: returns the sequence of (name of the source's manifest, row of that manifest).

    Raises:
        PlanError: the plan cannot be read.
        RunError: the plan has no mixture.
    """
    mixture = PlanReader(Path(plan)).metadata.mixture
    if mixture is None:
        raise RunError(f"{plan} is of one manifest; pass its fetch to the session directly")
    names = [source.name for source in mixture.sources]

    def fetch_row(row: int) -> Any:
        source, row = mixture.locate(row)
        return fetch(names[source], row)

    return fetch_row
