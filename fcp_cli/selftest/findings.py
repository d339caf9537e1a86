"""Findings of checks: their text for an issue, and their transfer from the ranks to the parent process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.reading.documents import decode_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        name: name of the check.
        passed: whether it passed; None if it only measures.
        lines: lines of the text report.
        figures: values for the JSON document.
    """

    name: str
    passed: bool | None
    lines: tuple[str, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelftestReport:
    """All findings of a run."""

    date: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> list[str]:
        return [finding.name for finding in self.findings if finding.passed is False]

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "fcp": __version__,
            "date": self.date,
            "passed": not self.failed,
            "checks": [asdict(finding) for finding in self.findings],
        }

    def block(self) -> str:
        """Return the report as text to paste into an issue."""
        verdict = f"FAILED: {', '.join(self.failed)}" if self.failed else "passed"
        lines = [f"fcp selftest {__version__}, {self.date}: {verdict}"]
        for finding in self.findings:
            mark = {True: "ok", False: "FAILED", None: "-"}[finding.passed]
            for number, line in enumerate(finding.lines or ("",)):
                head = f"{finding.name:<9} {mark:<6}" if number == 0 else " " * 16
                lines.append(f"{head} {line}".rstrip())
        return "\n".join(lines)


def now() -> str:
    """Return the current time for a report."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of rank 0's diary.

    Attributes:
        findings: findings of finished checks.
        current: running check or case; "" before the first and after the last.
        finished: whether all checks have finished.
    """

    findings: tuple[Finding, ...]
    current: str
    finished: bool


class Diary:
    """Log of rank 0's actions, line by line, so that after a hang the last action is known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, action: str) -> None:
        self._append({"begin": action})

    def found(self, finding: Finding) -> None:
        self._append({"found": asdict(finding)})

    def finish(self) -> None:
        self._append({"finished": True})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> Progress:
        """Read all complete lines; a partial last line is skipped."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return _progress([decode_json(line) for line in whole.splitlines()])


def _progress(lines: Sequence[Mapping[str, Any]]) -> Progress:
    findings, current, finished = [], "", False
    for line in lines:
        if "begin" in line:
            current = line["begin"]
        elif "found" in line:
            found = line["found"]
            findings.append(Finding(**{**found, "lines": tuple(found["lines"])}))
            current = ""
        else:
            finished = True
    return Progress(findings=tuple(findings), current=current, finished=finished)
