"""Whether anything in this process follows the plan: a job that trains without it must not go on in silence."""

from __future__ import annotations

from pathlib import Path

_plans: set[Path] = set()


def note_follower(plan: Path) -> None:
    """Called where this rank begins to read its micro-batches from a plan."""
    _plans.add(plan)


def is_followed() -> bool:
    """Whether a plan is being followed in this process."""
    return bool(_plans)
