"""Runs the worker that measures: here until it finishes, or by a command for every node of a cluster.

The samples file survives every failure: a worker that dies or a Ctrl-C leaves it, and the next run resumes it.
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

from fcp_cli.machine.processes import kill_tree
from fcp_cli.machine.torchrun import torchrun_argv
from fcp_cli.profiling.fits.measurement import Measurement
from fcp_cli.profiling.fits.samples import SamplesFile, read_samples

_POLL_SECONDS = 0.2
# After its budget a worker still measures the step and memory; beyond this it hangs.
_GRACE_SECONDS = 300.0
_WORKER = ("-m", "fcp_cli.profiling.workers.worker")


def run_measurement(
    measurement: Measurement, *, environment: Mapping[str, str], on_progress: Callable[[float, int], None]
) -> tuple[SamplesFile, str | None]:
    """Run the worker until it ends.

    Args:
        measurement: the measurement to run.
        environment: variables for the ranks on top of this process's: those that a job would get.
        on_progress: gets the elapsed seconds and the observations so far.

    Returns:
        All that was measured, in this run and in those before it; and why the worker ended before it was done, or None.
    """
    with tempfile.TemporaryDirectory(prefix="fcp-profile-") as folder:
        request = Path(folder) / "request.json"
        measurement.write(request)
        log = Path(folder) / "worker.log"
        argv = [*torchrun_argv(measurement.ranks), *_WORKER, str(request)]
        # One core per rank, as CPUs were always measured here; torch reads the variable when it is imported.
        threads = {"OMP_NUM_THREADS": "1"} if measurement.device == "cpu" else {}
        status = _run(argv, measurement, {**environment, **threads}, log, on_progress)
        samples = read_samples(measurement.samples)
        if samples.finished:
            return samples, None
        kept = len(samples.of_kind("observation"))
        return samples, (
            f"the measurement's worker ended early (status {status}): {reason_in_log(log)}; {kept} observations "
            f"are kept in {measurement.samples}: run the command again to continue"
        )


def cluster_command(measurement: Measurement, request: Path, *, master: str, environment: Mapping[str, str]) -> str:
    """Return the command for every node of a cluster, with NODE_RANK set to 0, 1, ...; the request is on shared
    storage.

    Args:
        measurement: the measurement on several nodes.
        request: the file that `Measurement.write` wrote.
        master: address of node 0.
        environment: variables of the job.
    """
    meeting = [f"--nnodes={measurement.nodes}", f"--master-addr={master}", "--master-port=29500"]
    argv = torchrun_argv(measurement.ranks // measurement.nodes, python="python", options=meeting)
    program = [*_WORKER, str(request.resolve())]
    # The shell of each node fills in its number, so it is not quoted here.
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return f'{variables}{shlex.join(argv)} --node-rank="$NODE_RANK" {shlex.join(program)}'


def _run(
    argv: Sequence[str],
    measurement: Measurement,
    environment: Mapping[str, str],
    log: Path,
    on_progress: Callable[[float, int], None],
) -> int | None:
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        while process.poll() is None:
            elapsed = time.monotonic() - began
            if elapsed > measurement.budget_seconds + _GRACE_SECONDS:
                break
            on_progress(elapsed, measurement.samples.read_bytes().count(b'"observation"'))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        return process.returncode
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


_KILLED: Final = re.compile(r"exitcode *: *-9\b")  # of torchrun's table of failed ranks


def reason_in_log(log: Path) -> str:
    """Return the last line of the log that names an error of a rank's own, else one that names any; else its last line.

    A rank that dies makes its neighbours fail, too, and torchrun after them.
    """
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line and "elastic" not in line]
    own = [line for line in errors if "Connection closed by peer" not in line]
    if not own and any(_KILLED.search(line) for line in lines):
        return "a rank was killed (SIGKILL), as where memory runs out; a smaller --model, or --analytic, needs less"
    lines = [line for line in lines if line.strip("=-")]  # torchrun ends with a rule
    return (own or errors or lines or ["it printed nothing"])[-1][:300]
