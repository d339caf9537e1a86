"""Findings of checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fcp_cli.machine.facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFinding:
    """A problem and its remedy, in one line."""

    severity: Literal["error", "warning"]
    message: str


def error(message: str) -> LaunchFinding:
    """Create a finding that stops the launch."""
    return LaunchFinding(severity="error", message=message)


def warning(message: str) -> LaunchFinding:
    """Create a finding that is printed without stopping the launch."""
    return LaunchFinding(severity="warning", message=message)


def number(facts: Facts, name: str) -> float | None:
    """Return the value of a numeric environment variable, or None if it is unset or not a number."""
    try:
        return float(facts.variables[name])
    except (KeyError, ValueError):
        return None
