"""Options that were merged into others: a user who still sets one is told its replacement."""

from __future__ import annotations

from typing import Final

RETIRED: Final[dict[tuple[str, str], str]] = {
    ("launch", "--random-weights"): "--weights random",
    ("launch", "--warmup-ratio"): "--warmup-steps X, which below 1 is a share of the schedule",
    ("manifest build", "--text-field"): "--column",
    ("profile", "--hf-config"): "--model, which takes a config.json",
}
"""Command and flag -> the option that took its place."""


def replacement(command: str, flag: str) -> str | None:
    """Return the end of a message that no such option exists: the option to use instead, or None.

    Args:
        command: words behind `fcp`, as "manifest build".
        flag: long flag, as typed.
    """
    instead = RETIRED.get((command, flag))
    return instead and f" any more; write {instead}"


def replacement_of_variable(name: str) -> str | None:
    """Return the same for a variable of the environment, as FCP_LAUNCH_RANDOM_WEIGHTS."""
    for command, flag in RETIRED:
        if name == f"FCP {command} {flag[2:]}".upper().replace(" ", "_").replace("-", "_"):
            return replacement(command, flag)
    return None
