"""Record the plans that this process follows, to detect a script that trains without its plan."""

from __future__ import annotations

from pathlib import Path

_plans: set[Path] = set()


def note_follower(plan: Path) -> None:
    """Record that this rank starts to read its micro-batches from a plan."""
    _plans.add(plan)


def is_followed() -> bool:
    """Return whether this process follows a plan."""
    return bool(_plans)
