"""Runs a job on this machine: shows its progress and reports its end."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fcp_cli.console import human, note, print_json, verbosity
from fcp_cli.errors import Interrupted, PlanError, RunError
from fcp_cli.words import counted, duration

_FAR_OFF = 1.5  # factor between predicted and measured step time that is reported

if TYPE_CHECKING:
    from fcp_cli.launching.job.job import Job
    from fcp_cli.launching.supervision.failure import Failure
    from fcp_cli.launching.supervision.run import JobOutcome
    from fcp_cli.launching.supervision.run_progress import RunProgress
    from fcp_cli.runs.ownership import Ownership
    from fcp_cli.runs.summary import RunSummary


def run_here(job: Job, owned: Ownership, *, json: bool) -> None:
    """Run this machine's ranks in an owned run directory, show their output, and report the end."""
    from fcp_cli.files import write_text_atomically
    from fcp_cli.launching.checks.preflight import check_run_dir
    from fcp_cli.launching.job.document import launch_record, resume_command
    from fcp_cli.launching.supervision.full_disk import full_disk_line, is_full
    from fcp_cli.runs.launch_record import write_launch
    from fcp_cli.runs.record import write_record

    node_rank = job.node_rank or 0
    check_run_dir(job)
    if node_rank == 0:
        if job.online is not None:
            write_text_atomically(job.paths.online, job.online.to_json())
        if job.planning is not None:
            write_text_atomically(job.paths.planning, dumps(asdict(job.planning)))
        write_record(job.run_dir, job.plan, job.metadata)
        write_launch(job.run_dir, launch_record(job))
    where = "this machine" if job.num_nodes == 1 else f"node {node_rank} of {job.num_nodes}"
    count, devices = job.processes_per_node, job.metadata.devices_per_rank
    processes = counted(count, "rank") if devices == 1 else f"{count} processes, {devices} to a rank of the plan,"
    note(f"starting {processes} on {where}; everything goes to {job.run_dir}")
    if shared := _shared_cores(job):
        note(shared)
    if node_rank == 0 and (expected := _predicted_time(job)):
        note(expected)
    outcome, progress = _run_watched(job, owned, node_rank, json=json)
    stopped_by = _stopped_by(outcome, bundled=job.is_bundled)
    if stopped_by is not None:
        stopped = Interrupted(_stop_message(job, resume_command(job)))
        stopped.exit_status = 128 + stopped_by  # like a shell for a program ended by that signal
        raise stopped
    if outcome.failure is not None and is_full(job.run_dir):
        raise RunError(full_disk_line(job.run_dir, resume_command(job) if job.is_bundled else ""))
    if outcome.failure is not None:
        _report_failure(outcome.failure, rank_0_is_shown=_shows(job))
    _report_end(job, progress.summary, json=json)


def _shared_cores(job: Job) -> str:
    """Return a note if more ranks run here than there are cores, else ""."""
    ranks, cores = job.processes_per_node, job.machine.num_cores
    if job.stack != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks share {counted(cores, 'CPU core')} and take turns: steps take longer than on a core each"


def _predicted_time(job: Job) -> str | None:
    """Return a line with the predicted time per step and in total, or None without a prediction."""
    from fcp_cli.plan.file.reader import PlanReader

    try:
        steps, seconds = PlanReader(job.plan).predicted_seconds()
    except PlanError:  # assumed plan: no file yet
        return None
    last = job.settings.steps if job.settings is not None else None
    if last is not None:
        seconds = seconds[steps < last]
    if not len(seconds) or not seconds.sum():
        return None
    basis = {"analytic": ", computed, not measured"}.get(job.profile.origin if job.profile is not None else "", "")
    return (
        f"planned: a step takes {duration(float(seconds.mean()))}, {counted(len(seconds), 'step')} "
        f"{duration(float(seconds.sum()))}{basis}"
    )


def _run_watched(job: Job, owned: Ownership, node_rank: int, *, json: bool) -> tuple[JobOutcome, RunProgress]:
    from fcp_cli.launching.supervision.meeting import NodeMeeting
    from fcp_cli.launching.supervision.run import Screen, run_job

    started, bundled = job.started_on(node_rank), job.is_bundled
    progress = _progress(job, node_rank)
    meeting = NodeMeeting(job=started, node_rank=node_rank, announce=note)

    def refresh() -> None:
        progress.poll()
        meeting.check()

    owned.ended = "failed"  # if an exception ends it
    try:
        outcome = run_job(
            started,
            node_rank=node_rank,
            screen=Screen(
                shows=_shows(job),
                watch=refresh,
                announce=note,
                # msrun merges stdout and stderr; the trainer's human-readable lines belong on stderr.
                stdout="stderr" if json or (bundled and job.launcher == "msrun") else "stdout",
            ),
        )
    finally:
        progress.close()
    interrupted = _stopped_by(outcome, bundled=bundled) is not None
    owned.ended = "interrupted" if interrupted else "failed" if outcome.status else "finished"
    return outcome, progress


def _progress(job: Job, node_rank: int) -> RunProgress:
    """Return the progress reporter; it prints steps of the bundled trainer only, since scripts print their own."""
    from fcp_cli.launching.supervision.run_progress import RunProgress
    from fcp_cli.training.progress import TrainingProgress

    if node_rank or verbosity.level < 0 or job.settings is None:
        return RunProgress(job.paths, None)
    return RunProgress(job.paths, TrainingProgress(human(), every=job.settings.log_every))


def _shows(job: Job) -> bool:
    """Return whether to show rank 0's output: only on node 0, and -q hides it for the bundled trainer."""
    return not job.node_rank and (not job.is_bundled or verbosity.level >= 0)


def _stopped_by(outcome: JobOutcome, *, bundled: bool) -> signal.Signals | None:
    """Return the signal that ended the job early, here or on another node, or None."""
    if outcome.agreed_to_stop:
        return outcome.stopped_by or signal.SIGINT
    if not bundled:
        return outcome.stopped_by
    return outcome.stopped_by if outcome.status else None


def _stop_message(job: Job, resume: str) -> str:
    from fcp_cli.runs.checkpoints.checkpoint_header import PREFIX, checkpoints

    if job.settings is None:
        return _script_stop_message(job)
    saved = checkpoints(job.paths.checkpoints)
    if not saved:
        return "interrupted before the first checkpoint; only the metrics were kept"
    step = int(saved[-1].name.removeprefix(PREFIX))
    return f"interrupted; {counted(step, 'step')} {'is' if step == 1 else 'are'} saved, continue with: {resume}"


def _script_stop_message(job: Job) -> str:
    from fcp_cli.launching.job.document import again_command
    from fcp_cli.runs.folder import from_here
    from fcp_cli.runs.stopped_script import read_stopped

    stopped = read_stopped(job.run_dir)
    if stopped is None:
        return f"interrupted; fcp found no checkpoint of the script; start again with: {again_command(job)}"
    steps, folder = counted(stopped.step, "step"), from_here(Path(stopped.checkpoint))
    return f"interrupted; {steps} saved in {folder}, continue with: {again_command(job)}"


def _report_failure(failure: Failure, *, rank_0_is_shown: bool) -> None:
    last_words, summary = failure.report(rank_0_is_shown=rank_0_is_shown)
    for line in last_words:
        note(line)
    if not summary:
        raise typer.Exit(1)
    raise RunError(summary)


def _report_end(job: Job, ran: RunSummary, *, json: bool) -> None:
    from fcp_cli.runs.summary import closing_line

    paths = job.paths
    summary: dict[str, Any] = {"run_dir": str(paths.run_dir), "plan_hash": job.metadata.plan_hash}
    if ran.first is not None and ran.last is not None:
        summary |= {"metrics": str(paths.metrics), "first": _ends(ran.first), "last": _ends(ran.last)}
    if not job.node_rank:
        if estimate := _wrong_estimate(job, ran.slowdown):
            note(estimate)
        note(closing_line(ran, paths))
    if json:
        print_json(summary)


def _wrong_estimate(job: Job, slowdown: float | None) -> str:
    """Return a note if measured and predicted step times differ by `_FAR_OFF` under an unmeasured profile; else ""."""
    profile = job.profile
    if slowdown is None or 1 / _FAR_OFF < slowdown < _FAR_OFF:
        return ""
    if profile is None or profile.origin not in ("analytic", "assumed"):
        return ""
    measuring = shlex.join(["fcp", "profile", *(["--model", job.model] if job.model is not None else [])])
    return (
        f"steps took {slowdown:.1f} times as long as planned: the times of {profile.model} on {profile.cluster} are "
        f"estimated, not measured; measure them with '{measuring}', and plan with --profile profile.yaml"
    )


def _ends(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("step", "loss", "seconds", "predicted_seconds", "idle_fraction")}
