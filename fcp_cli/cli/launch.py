"""`fcp launch`: run a training job under a plan, here or on several nodes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from fcp_cli.cli.command import takes
from fcp_cli.errors import FcpError, Interrupted, PlanError, RunError, UsageError
from fcp_cli.launching.request import LOCAL, LaunchRequest
from fcp_cli.util.console import (
    Assumptions,
    human,
    note,
    print_error,
    print_json,
    print_result,
    print_table,
    results,
    verbosity,
)
from fcp_cli.util.words import counted, duration

if TYPE_CHECKING:
    from fcp_cli.launching.failure import Failure
    from fcp_cli.launching.job import Job
    from fcp_cli.launching.memory_check import JobMemory
    from fcp_cli.launching.resolve import Claim
    from fcp_cli.launching.supervise import JobOutcome, RunProgress
    from fcp_cli.runs.metrics_reader import RunSummary
    from fcp_cli.runs.owner import Ownership
    from fcp_cli.util.findings import Finding
    from fcp_cli.util.machine import LocalDevices


@takes(
    "fcp launch --model qwen3-tiny --steps 100",
    "fcp launch --plan plan.parquet -- pretrain.py --lr 3e-4",
)
def launch(options: LaunchRequest) -> None:
    """Train under a plan: the bundled trainer, or your script after --.

    Everything runs here if this machine can hold the plan's ranks; with --nodes, each node runs its part.
    Ctrl-C stops at the end of the step with a checkpoint; 'fcp launch --resume' continues.
    """
    _refuse_unused(options)
    if options.inject == "env":
        _launch_own_command(options)
    elif options.preflight:
        _run_preflight(options)
    elif options.explain:
        _explain(_resolve(replace(options, dry_run=True)), json=options.json)
    else:
        _launch(options)


def _refuse_unused(options: LaunchRequest) -> None:
    """Raise UsageError for options that would have no effect."""
    if not options.program and options.inject is not None:
        raise UsageError("--inject is for a script or command of your own, given after --")
    if options.inject == "env" and options.online:
        raise UsageError("--online is for jobs that fcp starts, --inject env for commands that start their own ranks")
    if options.inject == "env" and (options.explain or options.preflight):
        flag = "--explain" if options.explain else "--preflight"
        raise UsageError(f"{flag} is for jobs that fcp starts; --inject env sets variables, which --dry-run shows")
    if not options.program and options.accept_other_batches:
        raise UsageError("--accept-other-batches is for a script of your own, given after --")
    given = [*options.training, *(name for name in ("manifest", "synthetic", "resume") if getattr(options, name))]
    if options.program and given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} is for the bundled trainer; give {options.program[0]} its own arguments after it")


def _launch_own_command(options: LaunchRequest) -> None:
    from fcp_cli.launching.commands import become
    from fcp_cli.launching.resolve import resolve_own_command

    for name in ("nodes", "node_rank", "master_addr"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for jobs that fcp starts; give it to {options.program[0]} itself"
            )
    if options.json and not options.dry_run:
        raise UsageError("--json with --inject env needs --dry-run: the command itself writes to stdout")
    environment = resolve_own_command(options)
    if not options.dry_run:
        become(options.program, environment)
        return
    shell = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *options.program])
    if options.json:
        print_json({"argv": options.program, "environment": environment, "shell": shell})
    else:
        sys.stdout.write(shell + "\n")


def _run_preflight(options: LaunchRequest) -> None:
    """Run only the checks; exit status 1 if one of them would stop the launch."""
    from fcp_cli.launching.refusals import check_space
    from fcp_cli.launching.software import error

    findings: list[Finding] = []
    memory = None
    try:
        job = _resolve(options)
        findings, memory = _findings(job)
        check_space(job)
    except UsageError:
        raise
    except FcpError as failure:  # without a job, no further check can run
        findings = [error(str(failure)), *findings]
    errors = sum(finding.severity == "error" for finding in findings)
    if options.json:
        shown = [{"severity": finding.severity, "message": finding.message} for finding in findings]
        print_json({"findings": shown, "memory": memory and memory.document()})
    else:
        _show_memory(memory)
        _show_findings(findings)
        counts = [(errors, "error"), (len(findings) - errors, "warning")]
        print_result(f"preflight: {', '.join(counted(*one) for one in counts if one[0]) or 'no problem found'}")
    if errors:
        raise typer.Exit(1)


def _launch(options: LaunchRequest) -> None:
    if options.dry_run or options.output is not None:
        _launch_job(_resolve(options), options)
        return
    with owned_job(options) as (job, owned):
        _launch_job(job, options, owned)


def _launch_job(job: Job, options: LaunchRequest, owned: Ownership | None = None) -> None:
    if options.output is not None and job.target == LOCAL:
        raise UsageError("-o writes the files of a cluster job; name one with --target, or see --dry-run")
    findings, memory = _findings(job)
    if not options.dry_run and memory is not None and not memory.is_host:
        _show_memory(memory)
    _show_findings(findings, starts=not options.dry_run)
    if any(finding.severity == "error" for finding in findings) and not options.dry_run:
        raise typer.Exit(1)
    if job.target != LOCAL:
        launch_on_cluster(job, options, owned)
    elif owned is None:
        _print_commands(job, json=options.json)
    else:
        run_here(job, owned, json=options.json)


def _resolve(options: LaunchRequest, claim: Claim | None = None) -> Job:
    """Resolve the options to a job, and print the assumptions."""
    from fcp_cli.launching.resolve import resolve, unclaimed

    request, device = options, options.device
    if device != "auto" and not options.program:
        request = replace(options, training={"device": device, **options.training})
    assumed = Assumptions()
    job = resolve(request, lambda: _find_machine(device, dry_run=options.dry_run), assumed, claim or unclaimed)
    assumed.report()
    return job


def _find_machine(device: str, *, dry_run: bool) -> LocalDevices:
    from fcp_cli.util.machine import UNKNOWN_MACHINE, find_machine

    try:
        return find_machine(device)
    except RunError as error:
        if not dry_run:
            raise
        note(f"{error}; the commands are for the nodes that the plan was made for")
        return UNKNOWN_MACHINE if device == "auto" else replace(UNKNOWN_MACHINE, device=device)


def _findings(job: Job) -> tuple[list[Finding], JobMemory | None]:
    """Return the findings of the launch checks, and the memory of a rank."""
    from fcp_cli.launching.checks import check_launch, collect_job_facts
    from fcp_cli.launching.memory_check import job_memory

    facts = collect_job_facts(job)
    return check_launch(job, facts), job_memory(job, facts)


def _show_memory(memory: JobMemory | None) -> None:
    from fcp_cli.launching.memory_check import memory_table

    if memory is not None:
        print_result(f"memory of {memory.title()}")
        print_table(results(), memory_table(memory))


def _show_findings(findings: list[Finding], *, starts: bool = True) -> None:
    """Print the findings; errors are printed as warnings if nothing is launched."""
    for finding in findings:
        if finding.severity == "error" and not starts:
            note(f"warning: a launch would fail: {finding.message}")
        elif finding.severity == "error":
            print_error(finding.message)
        else:
            note(f"warning: {finding.message}")


def _print_commands(job: Job, *, json: bool) -> None:
    """Print the commands of --dry-run on stdout, so that they can be piped into a file or a shell."""
    from fcp_cli.launching.commands import document_of
    from fcp_cli.launching.job import ADDRESS_TO_FILL_IN

    if job.num_nodes > 1:
        processes = counted(job.processes_per_node, "process")
        note(f"one command per node, {processes} each; all nodes must see {job.run_dir}")
        if job.master_addr == ADDRESS_TO_FILL_IN:
            note(f"put the address of node 0 for {ADDRESS_TO_FILL_IN}, or give it with --master-addr")
    document = document_of(job)
    if json:
        print_json(document)
        return
    for command in document["commands"]:
        if job.num_nodes > 1:
            sys.stdout.write(f"# node {command['node']}\n")
        sys.stdout.write(command["shell"] + "\n")


def _explain(job: Job, *, json: bool) -> None:
    """Print all variables of the job on stdout (--explain)."""
    from rich.console import Console

    from fcp_cli.launching.environment import explanation_document, explanation_table

    if json:
        print_json(explanation_document(job))
    else:
        console = Console(highlight=False)
        console.print(explanation_table(job, console.width))


# Cluster jobs: their files are printed, written, or submitted to Slurm.


def launch_on_cluster(job: Job, options: LaunchRequest, owned: Ownership | None) -> None:
    """Print the files of a job (--dry-run), write them (-o), or write them to the run directory and start the job.

    Only Slurm jobs are started; for the other targets, the start command is printed.

    Args:
        job: the job for a cluster.
        options: the options, as typed.
        owned: the owned run directory, released before the job starts; None if nothing is written there.
    """
    from fcp_cli.launching.commands import document_of
    from fcp_cli.launching.targets import job_files, start_command, target_of
    from fcp_cli.runs.run_dir import RunPaths
    from fcp_cli.util.files import json_text

    target, output = target_of(job.target), options.output
    files = job_files(target, job, template=options.cluster.template)
    document, answer = document_of(job, files), {}
    note(f"{counted(job.num_nodes, 'node')} with {counted(job.processes_per_node, 'process')} each")
    if job.values["mounts"] and any("kind: ClusterTrainingRuntime" in text for text in files.values()):
        paths = ", ".join(mount["path"] for mount in job.values["mounts"])
        note(f"warning: --mount adds no volume to a ClusterTrainingRuntime: see that the site's mounts {paths}")
    if options.dry_run:
        # A single file has no header, so that it can be piped into a file.
        headed = [f"# ---- {name}\n{text}" if len(files) > 1 else text for name, text in files.items()]
        sys.stdout.write("" if options.json else "".join(headed))
        if job.target == "slurm":
            note(f"to submit it by hand, write it with -o DIR: Slurm needs the folder of its log, {job.paths.logs}")
    elif output is not None:
        _write(output, {**files, RunPaths(run_dir=output).launch.name: json_text(document)})
        _note_start(start_command(target, job, output), resume=options.resume)
    elif owned is not None:
        answer = {
            "answer": _start(job, start_command(target, job, job.run_dir), files, document, owned, options.resume)
        }
    if options.json:
        texts = [{"name": name, "text": text} for name, text in files.items()]
        print_json({**document, "files": texts, **answer})


def _note_start(command: tuple[str, ...], *, resume: bool) -> None:
    if resume and command[:2] == ("kubectl", "apply"):  # which would leave the ended job of that name as it is
        command = ("kubectl", "replace", "--force", *command[2:])
    note(f"start the job with: {shlex.join(command)}")


def _write(folder: Path, files: Mapping[str, str], *, overwrite: bool = False) -> None:
    from fcp_cli.launching.targets import write_files

    write_files(folder, files, overwrite=overwrite)
    note(f"wrote {', '.join(str(folder / name) for name in files)}")


def _start(
    job: Job,
    command: tuple[str, ...],
    files: Mapping[str, str],
    document: Mapping[str, Any],
    owned: Ownership,
    resume: bool,
) -> str:
    """Write the files to the run directory and submit to Slurm; return sbatch's output, "" for other targets."""
    from fcp_cli.launching.refusals import check_run_dir
    from fcp_cli.launching.targets import require_sbatch, submit
    from fcp_cli.runs.run_dir import write_record
    from fcp_cli.util.files import write_json_atomically

    is_slurm = job.target == "slurm"
    if is_slurm:
        require_sbatch()
    check_run_dir(job)
    write_record(job.run_dir, job.plan.absolute(), job.metadata)
    write_json_atomically(job.paths.launch, document)
    job.paths.logs.mkdir(exist_ok=True)
    _write(job.run_dir, files, overwrite=True)  # may only replace files of this run's earlier start
    if not is_slurm:
        _note_start(command, resume=resume)
        return ""
    owned.release()
    answer = submit(command)
    note(f"{answer}; its output goes to {job.paths.logs}")
    return answer


# Ownership of the run directory, acquired before anything in it is read or changed.


@contextmanager
def owned_job(
    options: LaunchRequest, resolve: Callable[[LaunchRequest, Claim], Job] = _resolve
) -> Iterator[tuple[Job, Ownership]]:
    """Yield the resolved job and the ownership of its run directory."""
    from fcp_cli.runs.owner import own
    from fcp_cli.runs.run_dir import next_run_dir

    with ExitStack() as stack:
        owned: list[Ownership] = []
        # Equal on all nodes of a launch on several.
        job = f"{options.nodes} nodes at {options.master_addr}:{options.master_port}" if options.master_addr else ""

        def claim(run_dir: Path | None, name: str) -> Path:
            while True:
                path = run_dir or next_run_dir(name)
                taking = partial(own, path, node=options.node_rank or 0, job=job, announce=note)
                try:
                    owned.append(stack.enter_context(taking(must_be_new=run_dir is None)))
                except FileExistsError:
                    if run_dir is not None:
                        raise
                    continue  # a concurrent launch took this automatic run number
                return path

        yield resolve(options, claim), owned[0]


# A job on this machine: its progress and its end.


def run_here(job: Job, owned: Ownership, *, json: bool) -> None:
    """Run this machine's ranks in an owned run directory, show their output, and report the end."""
    from fcp_cli.launching.commands import document_of, resume_command
    from fcp_cli.launching.refusals import check_run_dir
    from fcp_cli.launching.supervise import full_disk_line, is_full
    from fcp_cli.runs.run_dir import write_record
    from fcp_cli.util.files import write_json_atomically, write_text_atomically

    node_rank = job.node_rank or 0
    check_run_dir(job)
    if node_rank == 0:
        if job.online is not None:
            write_text_atomically(job.paths.online, job.online.to_json())
        if job.planning is not None:
            write_json_atomically(job.paths.planning, asdict(job.planning))
        write_record(job.run_dir, job.plan, job.metadata)
        write_json_atomically(job.paths.launch, document_of(job))
    where = "this machine" if job.num_nodes == 1 else f"node {node_rank} of {job.num_nodes}"
    count, devices = job.processes_per_node, job.metadata.devices_per_rank
    processes = counted(count, "rank") if devices == 1 else f"{count} processes, {devices} to a rank of the plan,"
    note(f"starting {processes} on {where}; everything goes to {job.run_dir}")
    if shared := _shared_cores(job):
        note(shared)
    if node_rank == 0 and (expected := _predicted_time(job)):
        note(expected)
    outcome, progress = _run_watched(job, owned, node_rank, json=json)
    stopped_by = outcome.stop_signal(bundled=job.is_bundled)
    if stopped_by is not None:
        stopped = Interrupted(
            _saved(job, resume_command(job), ended="interrupted")
            if job.settings is not None
            else _saved_by_script(job, outcome.status)
        )
        stopped.exit_status = 128 + stopped_by  # like a shell for a program ended by that signal
        raise stopped
    if outcome.failure is not None and is_full(job.run_dir):
        raise RunError(full_disk_line(job.run_dir, resume_command(job) if job.is_bundled else ""))
    if outcome.failure is not None:
        reports = job.settings is not None and not node_rank
        saved = _saved(job, resume_command(job), ended="failed") if reports else ""
        _report_failure(outcome.failure, saved, rank_0_is_shown=_shows(job))
    _report_end(job, progress.summary, json=json)


def _shared_cores(job: Job) -> str:
    """Return a note if more ranks run here than there are cores, else ""."""
    ranks, cores = job.processes_per_node, job.machine.num_cores
    if job.stack != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks share {counted(cores, 'CPU core')} and take turns: steps take longer than on a core each"


def _predicted_time(job: Job) -> str | None:
    """Return a line with the predicted time per step and in total, or None without a prediction."""
    from fcp_cli.plan.file import PlanReader

    try:
        steps, seconds = PlanReader(job.plan).predicted_seconds()
    except PlanError:  # assumed plan: no file yet
        return None
    if job.settings is not None:
        first, last = _saved_steps(job) if job.settings.resume else 0, job.settings.steps or job.metadata.end_step
        seconds = seconds[(first <= steps) & (steps < last)]
    if not len(seconds) or not seconds.sum():
        return None
    basis = {"analytic": ", computed, not measured"}.get(job.profile.origin if job.profile is not None else "", "")
    return (
        f"planned: a step takes {duration(float(seconds.mean()))}, {counted(len(seconds), 'step')} "
        f"{duration(float(seconds.sum()))}{basis}"
    )


def _run_watched(job: Job, owned: Ownership, node_rank: int, *, json: bool) -> tuple[JobOutcome, RunProgress]:
    from fcp_cli.launching.supervise import NodeMeeting, Screen, run_job

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
    interrupted = outcome.stop_signal(bundled=bundled) is not None
    owned.ended = "interrupted" if interrupted else "failed" if outcome.status else "finished"
    return outcome, progress


def _progress(job: Job, node_rank: int) -> RunProgress:
    """Return the progress reporter; it prints steps of the bundled trainer only, since scripts print their own."""
    from fcp_cli.launching.supervise import RunProgress
    from fcp_cli.training.progress import TrainingProgress

    if node_rank or verbosity.level < 0 or job.settings is None:
        return RunProgress(job.paths, None)
    return RunProgress(job.paths, TrainingProgress(human(), every=job.settings.log_every))


def _shows(job: Job) -> bool:
    """Return whether to show rank 0's output: only on node 0, and -q hides it for the bundled trainer."""
    return not job.node_rank and (not job.is_bundled or verbosity.level >= 0)


def _saved_steps(job: Job) -> int:
    """Return the step of the run's newest checkpoint; 0 without one."""
    from fcp_cli.runs.checkpoints import PREFIX, checkpoints

    saved = checkpoints(job.paths.checkpoints)
    return int(saved[-1].name.removeprefix(PREFIX)) if saved else 0


def _saved(job: Job, resume: str, *, ended: Literal["interrupted", "failed"]) -> str:
    """Return what an ended run of the bundled trainer has saved, and the command that continues it."""
    assert job.settings is not None
    step = _saved_steps(job)
    if not step:
        return f"{ended} before the first checkpoint; only the metrics were kept"
    if step == (job.settings.steps or job.metadata.end_step):
        return f"{ended} after the last of {counted(step, 'step')}, which are saved: nothing is left to resume"
    return f"{ended}; {counted(step, 'step')} {'is' if step == 1 else 'are'} saved, continue with: {resume}"


def _saved_by_script(job: Job, status: int) -> str:
    """Return what an interrupted script has saved, as far as fcp knows, and the command that continues it."""
    from fcp_cli.launching.commands import again_command
    from fcp_cli.runs.run_dir import from_here, read_stopped

    stopped = read_stopped(job.run_dir)
    if stopped is not None:
        steps, folder = counted(stopped.step, "step"), from_here(Path(stopped.checkpoint))
        return f"interrupted; {steps} saved in {folder}, continue with: {again_command(job)}"
    if status:
        return f"interrupted; fcp found no checkpoint of the script; start again with: {again_command(job)}"
    return f"interrupted; the script ended by itself; continue with: {again_command(job)}"


def _report_failure(failure: Failure, saved: str, *, rank_0_is_shown: bool) -> None:
    last_words, summary = failure.report(rank_0_is_shown=rank_0_is_shown)
    for line in last_words:
        note(line)
    if not summary:  # the cause is the last line already
        raise typer.Exit(1)
    if saved:
        note(saved)
    raise RunError(summary)


def _report_end(job: Job, ran: RunSummary, *, json: bool) -> None:
    from fcp_cli.runs.metrics_reader import closing_line

    paths = job.paths
    summary: dict[str, Any] = {"run_dir": str(paths.run_dir), "plan_hash": job.metadata.plan_hash}
    if ran.first is not None and ran.last is not None:
        summary |= {"metrics": str(paths.metrics), "first": _ends(ran.first), "last": _ends(ran.last)}
    if job.node_rank:
        steps = f"{counted(ran.steps, 'step')}; " if ran.steps else ""
        note(f"done on node {job.node_rank} of {job.num_nodes}: {steps}loss, times and metrics are on node 0")
    else:
        if estimate := _wrong_estimate(job, ran.slowdown):
            note(estimate)
        note(closing_line(ran, paths))
    if json:
        print_json(summary)


def _wrong_estimate(job: Job, slowdown: float | None) -> str:
    """Return a note if step times differ by `FAR_OFF` from a plan's estimates, unless the cores were busy; else ""."""
    from fcp_cli.runs.metrics_reader import FAR_OFF, busy_cores

    profile = job.profile
    if profile is None or profile.is_measured:
        return ""
    if slowdown is None or 1 / FAR_OFF < slowdown < FAR_OFF or busy_cores():
        return ""
    measuring = shlex.join(["fcp", "profile", *(["--model", job.model] if job.model is not None else [])])
    return (
        f"the plan's times of {profile.model} on {profile.cluster} are estimates, and steps took {slowdown:.1f} times "
        f"as long; measure them with '{measuring}', and plan with --profile profile.yaml"
    )


def _ends(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("step", "loss", "seconds", "predicted_seconds", "idle_fraction")}
