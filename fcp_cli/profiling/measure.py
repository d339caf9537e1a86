"""Runs the measuring worker: locally until it finishes, or by a command for each node of a cluster.

The samples file survives failures and Ctrl-C, and the next run resumes it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fcp_cli.profiling.samples import Measurement, SamplesFile, read_samples
from fcp_cli.util.processes import kill_tree, meeting_options, torchrun_argv

_POLL_SECONDS = 0.2
# After its budget, a worker still measures step and memory; beyond this grace time it counts as hanging.
_GRACE_SECONDS = 300.0
_WORKER = ("-m", "fcp_cli.profiling.worker")


def run_measurement(
    measurement: Measurement, *, environment: Mapping[str, str], on_progress: Callable[[float, int], None]
) -> tuple[SamplesFile, str | None]:
    """Run the worker until it ends.

    Args:
        measurement: the measurement to run.
        environment: job variables, on top of this process's environment.
        on_progress: called with elapsed seconds and number of observations.

    Returns:
        All samples of this and earlier runs, and why the worker ended early, or None.
    """
    with tempfile.TemporaryDirectory(prefix="fcp-profile-") as folder:
        request = Path(folder) / "request.json"
        measurement.write(request)
        log = Path(folder) / "worker.log"
        argv = [*torchrun_argv(measurement.ranks), *_WORKER, str(request)]
        # One core per rank for reproducible CPU measurements; torch reads the variable on import.
        threads = {"OMP_NUM_THREADS": "1"} if measurement.device == "cpu" else {}
        began = time.monotonic()

        def goes_on() -> bool:
            elapsed = time.monotonic() - began
            on_progress(elapsed, measurement.samples.read_bytes().count(b'"observation"'))
            return elapsed <= measurement.budget_seconds + _GRACE_SECONDS

        status = run_logged(argv, log, environment={**environment, **threads}, goes_on=goes_on)
        samples = read_samples(measurement.samples)
        if samples.finished:
            return samples, None
        kept = len(samples.of_kind("observation"))
        return samples, (
            f"the measurement's worker ended early (status {status}): {reason_in_log(log)}; {kept} observations "
            f"are kept in {measurement.samples}: run the command again to continue"
        )


def cluster_command(measurement: Measurement, request: Path, *, master: str, environment: Mapping[str, str]) -> str:
    """Return the command for each node of a cluster, on which NODE_RANK must be 0, 1, ...

    Args:
        measurement: measurement on several nodes.
        request: file written by `Measurement.write`, on shared storage.
        master: address of node 0.
        environment: job variables.
    """
    meeting = meeting_options(measurement.nodes, address=master, port=29500, job=str(request.resolve()))
    argv = torchrun_argv(measurement.ranks // measurement.nodes, python="python", options=meeting)
    program = [*_WORKER, str(request.resolve())]
    # Not quoted: the shell of each node substitutes its number.
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return f'{variables}{shlex.join(argv)} --rdzv-conf=rank="$NODE_RANK" {shlex.join(program)}'


def run_logged(
    argv: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str],
    goes_on: Callable[[], bool],
    before_kill: Callable[[int], None] = lambda pid: None,
) -> int | None:
    """Run a program with its output in a log; kill it with all its children if it hangs or on an exception.

    Args:
        argv, log: the program and its log.
        environment: variables, on top of this process's environment.
        goes_on: called several times a second; False if the program hangs.
        before_kill: called with the process id of a program that hangs.

    Returns:
        The exit status, or None if the program hung.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        while process.poll() is None:
            if not goes_on():
                before_kill(process.pid)
                return None
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        return process.returncode
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


_KILLED: Final = re.compile(r"exitcode *: *-9\b")  # in torchrun's table of failed ranks


def reason_in_log(log: Path) -> str:
    """Return the log's last line with a rank's own error, else with any error, else its last line.

    A dying rank makes its peers fail, and then torchrun.
    """
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line and "elastic" not in line]
    own = [line for line in errors if "Connection closed by peer" not in line]
    if not own and any(_KILLED.search(line) for line in lines):
        return "a rank was killed (SIGKILL), probably out of memory; a smaller --model, or --analytic, needs less"
    lines = [line for line in lines if line.strip("=-")]  # drop torchrun's separator line
    return (own or errors or lines or ["it printed nothing"])[-1][:300]
