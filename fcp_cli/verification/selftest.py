"""Ranks of `fcp selftest`: their settings, findings and diary, and the parent process that watches them.

The ranks (`worker`) run the checks of a user's node in a job's environment; a check that hangs becomes a finding. Does
not import torch.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from fcp_cli import __version__
from fcp_cli.errors import RunError
from fcp_cli.profiling.measure import reason_in_log, run_logged
from fcp_cli.util.files import write_text_atomically
from fcp_cli.util.findings import Finding
from fcp_cli.util.inputs import decode_json, read_json
from fcp_cli.util.processes import descendants, send

_STACKS_SECONDS = 2.0  # for hanging ranks to write their stacks
_STACK_LINES = 200
WORKER = ("-m", "fcp_cli.verification.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of the ranks.

    Attributes:
        folder: folder for the diary, plans and samples; shared by all nodes.
        device: kind of device.
        quick: whether to use small sizes.
        writes_report: whether rank 0 writes and prints the report, if no parent process monitors it.
    """

    folder: Path
    device: str
    quick: bool
    writes_report: bool = False

    @property
    def diary(self) -> Diary:
        return Diary(self.folder / "diary.jsonl")

    @property
    def report(self) -> Path:
        """Report file of rank 0."""
        return self.folder / "report.json"

    @property
    def measurement(self) -> Path:
        """Measurement request for the packs check."""
        return self.folder / "measurement.json"

    def write(self) -> Path:
        """Write the settings file and return its path."""
        path = self.folder / "settings.json"
        write_text_atomically(path, json.dumps({**asdict(self), "folder": str(self.folder)}))
        return path


def read_settings(path: Path) -> Settings:
    """Read a file written by `Settings.write`."""
    document: dict[str, Any] = read_json(path, error=RunError)
    return Settings(**{**document, "folder": Path(document["folder"])})


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


class Progress(NamedTuple):
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
        findings, current, finished = [], "", False
        for line in map(decode_json, text[: text.rfind("\n") + 1].splitlines()):
            if "begin" in line:
                current = line["begin"]
            elif "found" in line:
                findings.append(Finding(**{**line["found"], "lines": tuple(line["found"]["lines"])}))
                current = ""
            else:
                finished = True
        return Progress(tuple(findings), current, finished)


def watch(
    settings: Settings,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    limit_seconds: float,
    on_progress: Callable[[str], None],
) -> SelftestReport:
    """Run the program with the checks and report its findings; kill it if it hangs.

    Args:
        settings: names the folder and the diary of the program.
        argv, environment: the program, and variables on top of this process's environment.
        limit_seconds: maximum time without progress of a check or case.
        on_progress: called with each new check.
    """
    log = settings.folder / "ranks.log"
    heard, told, shown = time.monotonic(), 0, ""

    def progresses() -> bool:
        nonlocal heard, told, shown
        files = [settings.diary.path, *settings.folder.glob("*.samples.jsonl")]
        size = sum(path.stat().st_size for path in files if path.exists())
        if size != told:
            heard, told = time.monotonic(), size
            check = settings.diary.read().current.partition(":")[0]
            if check not in ("", shown):
                on_progress(f"checking {check}")
                shown = check
        return time.monotonic() - heard <= limit_seconds

    def ask_for_stacks(pid: int) -> None:
        send(descendants(pid), signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)

    status = run_logged(argv, log, environment=environment, goes_on=progresses, before_kill=ask_for_stacks)
    return SelftestReport(date=now(), findings=tuple(_findings(settings.diary.read(), status, log)))


def _findings(progress: Progress, status: int | None, log: Path) -> list[Finding]:
    """Return what the checks found, and the check that hangs (`status` is None) or ended the ranks."""
    found = list(progress.findings)
    if progress.finished:
        return found
    where = progress.current or "the start of the ranks"
    name = where.partition(":")[0] if progress.current else "start"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_STACK_LINES:]
    if status is None:
        stacks = [line.strip() for line in lines if line.strip().startswith("File ")][:4]
        line = f"HANGS in {where}; ranks stand at: {'; '.join(stacks) or 'unknown'}"
    else:
        line = f"the ranks ended with status {status} in {where}: {reason_in_log(log)}"
    return [*found, Finding(name=name, passed=False, lines=(line,), figures={"log": lines})]
