"""The finding of a check, for `fcp launch` and `fcp selftest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        name: name of the check.
        passed: whether it passed; None if it only measures or warns.
        lines: lines of text; a launch check has one, with the problem and its remedy.
        figures: values for the JSON document.
    """

    name: str
    passed: bool | None
    lines: tuple[str, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Literal["error", "warning"]:
        """Severity of a launch check's finding: errors stop the launch."""
        return "error" if self.passed is False else "warning"

    @property
    def message(self) -> str:
        return "\n".join(self.lines)
