"""Starts and monitors the ranks of a test: a check that hangs becomes a finding."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fcp_cli.machine.processes import descendants, kill_tree, send
from fcp_cli.machine.torchrun import torchrun_argv
from fcp_cli.profiling.measure import reason_in_log
from fcp_cli.selftest.findings import Finding, Progress, SelftestReport, now
from fcp_cli.selftest.settings import Settings

_POLL_SECONDS = 0.2
_STACKS_SECONDS = 2.0  # for hanging ranks to write their stacks
_STACK_LINES = 200
WORKER = ("-m", "fcp_cli.selftest.worker")


def run_selftest(
    settings: Settings,
    *,
    ranks: int,
    environment: Mapping[str, str],
    limit_seconds: float,
    on_progress: Callable[[str], None],
) -> SelftestReport:
    """Run all checks on this node's ranks and return their findings.

    Args:
        settings: settings of the ranks; its folder has the measurement request.
        ranks: number of processes.
        environment: job variables, on top of this process's environment.
        limit_seconds: time limit of a check or of a case.
        on_progress: called with the name of each check when it starts.
    """
    argv = [*torchrun_argv(ranks), *WORKER, str(settings.write())]
    return watch(settings, argv, environment=environment, limit_seconds=limit_seconds, on_progress=on_progress)


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
        limit_seconds: maximum time without progress.
        on_progress: called with each new check.
    """
    log = settings.folder / "ranks.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **environment})
    hangs = False
    try:
        hangs = _hangs(process, settings, limit_seconds, on_progress)
    finally:
        if process.poll() is None:
            if hangs:
                _ask_where(process.pid)
            kill_tree(process.pid)
            process.wait()
    return SelftestReport(date=now(), findings=tuple(_findings(settings.diary.read(), process.returncode, hangs, log)))


def _hangs(
    process: subprocess.Popen[bytes],
    settings: Settings,
    limit_seconds: float,
    on_progress: Callable[[str], None],
) -> bool:
    """Wait for the process to end; return True if its diary stopped growing."""
    heard, told, shown = time.monotonic(), 0, ""
    while process.poll() is None:
        size = _told(settings)
        if size != told:
            heard, told = time.monotonic(), size
            check = settings.diary.read().current.partition(":")[0]
            if check not in ("", shown):
                on_progress(f"checking {check}")
                shown = check
        if time.monotonic() - heard > limit_seconds:
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    return False


def _told(settings: Settings) -> int:
    """Return how many bytes the ranks have written to the diary and samples."""
    files = [settings.diary.path, *settings.folder.glob("*.samples.jsonl")]
    return sum(path.stat().st_size for path in files if path.exists())


def _ask_where(pid: int) -> None:
    """Make every rank write its stack to the log."""
    send(descendants(pid), signal.SIGUSR1)
    time.sleep(_STACKS_SECONDS)


def _findings(progress: Progress, status: int | None, hangs: bool, log: Path) -> list[Finding]:
    found = list(progress.findings)
    if progress.finished:
        return found
    where = progress.current or "the start of the ranks"
    name = where.partition(":")[0] if progress.current else "start"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_STACK_LINES:]
    if hangs:
        stacks = [line.strip() for line in lines if line.strip().startswith("File ")][:4]
        line = f"HANGS in {where}; ranks stand at: {'; '.join(stacks) or 'unknown'}"
    else:
        line = f"the ranks ended with status {status} in {where}: {reason_in_log(log)}"
    return [*found, Finding(name=name, passed=False, lines=(line,), figures={"log": lines})]
