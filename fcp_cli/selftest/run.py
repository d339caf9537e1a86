"""Starts the ranks of a test and watches over them: a check that does not end is a finding, not a hang."""

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
_STACKS_SECONDS = 2.0  # for ranks that hang to say where
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
        settings: the settings of the ranks; its folder holds the request of the packs.
        ranks: processes.
        environment: variables that a job would get, on top of this process's.
        limit_seconds: the limit seconds that a check, or a case of one, may take.
        on_progress: called with the name of each check as it begins.
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
    """Run the program of the checks and report what it found; end it if it hangs.

    Args:
        settings: name the folder, and the diary to which the program writes its progress.
        argv, environment: the program, and variables that it gets besides those of this process.
        limit_seconds: how long the program may make no progress.
        on_progress: is given what the program is at, when that changes.
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
    """Wait for the end; return True if the diary stopped growing before it."""
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
    """Return how much the ranks have written: in the diary, and in the samples while packs are timed."""
    files = [settings.diary.path, *settings.folder.glob("*.samples.jsonl")]
    return sum(path.stat().st_size for path in files if path.exists())


def _ask_where(pid: int) -> None:
    """Let every rank write into the log where it stands."""
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
