"""Entry point of a cluster node: runs and monitors the launcher command after `--`, from a generated script.

It behaves like `fcp launch` on one machine: SIGINT, SIGTERM and SIGHUP let ranks finish their step, local rank 0 of
node 0 is shown, a failed rank is reported with its last lines, and no process is left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from fcp_cli.errors import FcpError, RunError
from fcp_cli.launching.commands import path_of_python
from fcp_cli.launching.environment import interface_value
from fcp_cli.launching.job import PLAN_VARIABLE, RUN_DIR_VARIABLE
from fcp_cli.launching.supervise import JobOutcome, RunProgress, Screen, full_disk_line, is_full, run_command
from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics_reader import closing_line
from fcp_cli.runs.owner import STALE_SECONDS, Ownership, own, readable_owner
from fcp_cli.runs.run_dir import RunPaths, write_record
from fcp_cli.util.files import write_text_atomically
from fcp_cli.util.network import interface_towards, port_problem, resolution_problem

_STOP_FILE_VARIABLE = "FCP_STOP_FILE"  # set by the Slurm script, which creates the file on SIGTERM
# Names of a cluster's job, which all its nodes and all its starts have in common; the second is set by templates.
_JOB_VARIABLES = {"SLURM_JOB_ID": "slurm ", "FCP_JOB": ""}
_TRAINER = "fcp_cli.training.train"
_OWNER_SECONDS = 1.5 * STALE_SECONDS  # after this, an owner on another node counts as gone
_LOOK_UP_SECONDS = 5.0  # name resolution may fail briefly while all nodes of a job start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if it failed, or 128 + the signal that stopped it."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m fcp_cli.launching.node", allow_abbrev=False)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--grace", type=int, default=45, help="seconds from a request to stop until ranks are killed")
    parser.add_argument("--master-addr", default="", help="of node 0")
    parser.add_argument("--master-port", type=int, help="where node 0 will listen")
    parser.add_argument(
        "--interface-for",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="set it to the network interface towards --master-addr, unless it is set",
    )
    parser.add_argument("--record", type=Path, help="resolved launch, for the run directory: --resume reads it there")
    options = parser.parse_args(words[:at])
    options.log_dir, command = _unused_logs(options.log_dir, words[at + 1 :])
    if not command:
        parser.error("the command to run comes after --")
    try:
        _require_address(options.master_addr)
        environment = _environment(options)
        with ExitStack() as owned:
            return _run(_resumed(command, environment), options, environment, owned)
    except (FcpError, OSError) as error:
        _print(f"error: node {options.node_rank}: {error}")
        return 1


def _unused_logs(log_dir: Path, command: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the log folder of this start, and the command with it.

    A pod that comes back has its former name: output of the earlier start would be shown as this one's.
    """
    unused, number = log_dir, 0
    while unused.exists():
        number += 1
        unused = log_dir.with_name(f"{log_dir.name}-restart{number}")
    moved = {f"--log{dash}dir={log_dir}": f"--log{dash}dir={unused}" for dash in "-_"}  # of torchrun, of msrun
    return unused, [moved.get(word, word) for word in command]


def _own(run_dir: Path) -> Ownership:
    """Acquire the run directory; wait for a stale owner, since after a restart the old node may seem alive."""
    return own(
        run_dir,
        job=_cluster_job(),
        restarts=bool(_cluster_job()),
        patience_seconds=_OWNER_SECONDS,
        announce=_print,
    )


def _run(command: Sequence[str], options: argparse.Namespace, environment: Mapping[str, str], owned: ExitStack) -> int:
    is_first = options.node_rank == 0
    progress: RunProgress | None = None
    owner: Ownership | None = None
    if is_first and options.master_port is not None and (problem := port_problem(options.master_port)):
        where = f"port {options.master_port} of {socket.gethostname()}"
        raise RunError(f"{where} is {problem}; choose another with --master-port")
    if is_first and RUN_DIR_VARIABLE in environment:
        paths = RunPaths(run_dir=Path(environment[RUN_DIR_VARIABLE]))
        owner = owned.enter_context(_own(paths.run_dir))
        _write_record(paths, Path(environment[PLAN_VARIABLE]), options.record)
        owner.ended, progress = "failed", RunProgress(paths, None)  # ranks show their own steps
    outcome = run_command(
        command,
        environment=environment,
        log_dir=options.log_dir,
        screen=Screen(shows=is_first, watch=(lambda: None) if progress is None else progress.poll, announce=_print),
        grace_seconds=options.grace,
        stop_file=Path(environment[_STOP_FILE_VARIABLE]) if _STOP_FILE_VARIABLE in environment else None,
    )
    stopped_by = outcome.stop_signal(bundled=_TRAINER in command)
    if owner is not None:
        owner.ended = "interrupted" if stopped_by else "failed" if outcome.status else "finished"
    if progress is not None:
        progress.close()
        if not outcome.status and not stopped_by:
            _print(closing_line(progress.summary, progress.paths))
        if outcome.failure is not None and is_full(progress.paths.run_dir):
            _print(f"error: {full_disk_line(progress.paths.run_dir, resume='')}")
            return 1
    return _report(outcome, stopped_by=stopped_by, shows=is_first)


def _cluster_job() -> str:
    """Return the identity of the cluster's job, the same after a restart; "" without a cluster."""
    return next((kind + os.environ[name] for name, kind in _JOB_VARIABLES.items() if os.environ.get(name)), "")


def _resumed(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Add --resume to the bundled trainer's command if the cluster has started this job before.

    The run directory then names this job, and has metrics, which begin only after all nodes have met. The trainer
    continues from the newest checkpoint, or starts over if there is none.
    """
    if _TRAINER not in command or "--resume" in command or RUN_DIR_VARIABLE not in environment:
        return command
    paths, job = RunPaths(run_dir=Path(environment[RUN_DIR_VARIABLE])), _cluster_job()
    before = readable_owner(paths.owner_of(0))
    is_restart = job and before is not None and before.job == job and paths.metrics.exists()
    return [*command, "--resume"] if is_restart else command


def _require_address(name: str) -> None:
    """Wait for node 0's name to resolve; raise RunError under Slurm, else warn. torchrun would take minutes."""
    end = time.monotonic() + _LOOK_UP_SECONDS
    while reason := resolution_problem(name):
        if time.monotonic() > end:
            problem = f"{socket.gethostname()} cannot find node 0 by the name {name} ({reason})"
            if "SLURM_JOB_ID" in os.environ:
                remedy = "let the nodes' resolver know it, or set MASTER_ADDR in the script to an address"
                raise RunError(f"{problem}; {remedy}")
            _print(f"warning: {problem}; waiting for it")
            break
        time.sleep(0.5)


def _write_record(paths: RunPaths, plan: Path, launch: Path | None) -> None:
    """Write the plan, the versions and the launch record to the run directory."""
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    write_record(paths.run_dir, plan, PlanReader(plan).metadata)
    if launch is not None:
        try:
            write_text_atomically(paths.launch, launch.read_text(encoding="utf-8"))
        except OSError as error:
            _print(f"warning: cannot read {launch} ({error.strerror}): 'fcp launch --resume' will not know this run")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    # Set here, since only the node knows its interface towards node 0.
    interface = interface_towards(options.master_addr) if options.interface_for else None
    own = {name: interface_value(name, interface) for name in options.interface_for} if interface else {}
    # Slurm's proctrack/linuxproc also signals torchrun, which would kill the ranks after 30 seconds.
    found = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(options.grace), **own, **os.environ}
    # msrun runs the first `python` on PATH.
    return {**found, "PATH": path_of_python(sys.executable, found.get("PATH", ""))}


def _report(outcome: JobOutcome, *, stopped_by: signal.Signals | None, shows: bool) -> int:
    """Print the failure or the signal, if any; return the exit status."""
    if stopped_by:
        _print(f"error: stopped by {stopped_by.name}" if outcome.stopped_by else "error: stopped with the other nodes")
        return 128 + stopped_by
    if outcome.failure is None:
        return 0
    last_words, summary = outcome.failure.report(rank_0_is_shown=shows)
    if lines := [*last_words, *([f"error: {summary}"] if summary else [])]:
        _print("\n".join(lines))
    return 1


def _print(message: str) -> None:
    """Print to stderr in a single write, since nodes of a job share a terminal."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


class _Lasting:
    """A stream that ignores write errors, so that a lost terminal does not abort a step before its checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


if __name__ == "__main__":
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)
    sys.exit(main())
