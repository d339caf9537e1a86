"""What a check finds, and the words that it is put in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fcp_cli.machine.facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, and how to mend it, in one line."""

    severity: Literal["error", "warning"]
    message: str


def error(message: str) -> Finding:
    """What stops the launch."""
    return Finding(severity="error", message=message)


def warning(message: str) -> Finding:
    """What is shown, while the job runs."""
    return Finding(severity="warning", message=message)


def number(facts: Facts, name: str) -> float | None:
    """An environment variable that is a number; None where it is not set, or is none."""
    try:
        return float(facts.variables[name])
    except (KeyError, ValueError):
        return None
