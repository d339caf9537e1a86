"""`fcp launch`: run a training job under a plan, here or on several nodes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from fcp_cli.command_line.command import takes
from fcp_cli.commands.launch.cluster import launch_on_cluster
from fcp_cli.commands.launch.owning import owned_job
from fcp_cli.commands.launch.running import run_here
from fcp_cli.console import Assumptions, note, print_error, print_json, print_result, print_table, results
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.launching.request import LaunchRequest
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.launching.checks import LaunchFinding
    from fcp_cli.launching.checks.memory import JobMemory
    from fcp_cli.launching.job.job import Job
    from fcp_cli.machine.devices import LocalDevices
    from fcp_cli.runs.ownership import Ownership


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
    if not options.program:
        if options.inject is not None:
            raise UsageError("--inject is for a script or command of your own, given after --")
        if options.probe is not None:  # `fcp verify` covers the bundled trainer
            raise UsageError(
                "--probe and --no-probe are for a script of your own, given after --; see also 'fcp verify'"
            )
    if options.probe and options.inject == "none":
        raise UsageError("--probe needs hooks, which --inject none disables")
    if options.inject == "env" and options.online:
        raise UsageError("--online is for jobs that fcp starts, --inject env for commands that start their own ranks")
    if options.inject == "env" and (options.explain or options.preflight):
        flag = "--explain" if options.explain else "--preflight"
        raise UsageError(f"{flag} is for jobs that fcp starts; --inject env sets variables, which --dry-run shows")
    given = [*options.training, *(name for name in ("manifest", "synthetic", "resume") if getattr(options, name))]
    if options.program and given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} is for the bundled trainer; give {options.program[0]} its own arguments after it")


def _launch_own_command(options: LaunchRequest) -> None:
    from fcp_cli.launching.job.inject import become
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
    from fcp_cli.launching.checks import LaunchFinding
    from fcp_cli.launching.checks.preflight import check_space

    findings: list[LaunchFinding] = []
    memory = None
    try:
        job = _resolve(options)
        findings, memory = _findings(job)
        check_space(job)
    except UsageError:
        raise
    except FcpError as error:  # without a job, no further check can run
        findings = [LaunchFinding(severity="error", message=str(error)), *findings]
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
    with owned_job(options, _resolve) as (job, owned):
        _launch_job(job, options, owned)


def _launch_job(job: Job, options: LaunchRequest, owned: Ownership | None = None) -> None:
    if options.force and options.output is None:
        raise UsageError("--force replaces files in the folder of -o; give -o too")
    if options.output is not None and job.cluster is None:
        raise UsageError("-o writes the files of a cluster job; name one with --target, or see --dry-run")
    findings, memory = _findings(job)
    if not options.dry_run and memory is not None and not memory.is_host:
        _show_memory(memory)
    _show_findings(findings, starts=not options.dry_run)
    if any(finding.severity == "error" for finding in findings) and not options.dry_run:
        raise typer.Exit(1)
    if job.cluster is not None:
        launch_on_cluster(job, options, owned)
    elif owned is None:
        _print_commands(job, json=options.json)
    else:
        run_here(job, owned, json=options.json)


def _resolve(options: LaunchRequest) -> Job:
    """Resolve the options to a job, and print the assumptions."""
    from fcp_cli.launching.resolve import resolve

    request, device = options, options.device
    if device != "auto" and not options.program:
        request = replace(options, training={"device": device, **options.training})
    assumed = Assumptions()
    job = resolve(request, lambda: _find_machine(device, dry_run=options.dry_run), assumed)
    assumed.report()
    return job


def _find_machine(device: str, *, dry_run: bool) -> LocalDevices:
    from fcp_cli.machine.devices import UNKNOWN_MACHINE, find_machine

    try:
        return find_machine(device)
    except RunError as error:
        if not dry_run:
            raise
        note(f"{error}; the commands are for the nodes that the plan was made for")
        return UNKNOWN_MACHINE if device == "auto" else replace(UNKNOWN_MACHINE, device=device)


def _findings(job: Job) -> tuple[list[LaunchFinding], JobMemory | None]:
    """Return the findings of the launch checks, and the memory of a rank."""
    from fcp_cli.launching.checks import check_launch, collect_job_facts
    from fcp_cli.launching.checks.memory import job_memory

    facts = collect_job_facts(job)
    return check_launch(job, facts), job_memory(job, facts)


def _show_memory(memory: JobMemory | None) -> None:
    from fcp_cli.launching.checks.memory import memory_table

    if memory is not None:
        print_result(f"memory of {memory.title()}")
        print_table(results(), memory_table(memory))


def _show_findings(findings: list[LaunchFinding], *, starts: bool = True) -> None:
    """Print the findings; errors are printed as warnings if nothing is launched."""
    for finding in findings:
        if finding.severity == "error" and not starts:
            note(f"warning: a launch from this machine would fail: {finding.message}")
        elif finding.severity == "error":
            print_error(finding.message)
        else:
            note(f"warning: {finding.message}")


def _print_commands(job: Job, *, json: bool) -> None:
    """Print the commands of --dry-run on stdout, so that they can be piped into a file or a shell."""
    from fcp_cli.launching.job.document import launch_record
    from fcp_cli.launching.job.job import ADDRESS_TO_FILL_IN

    if job.num_nodes > 1:
        processes = counted(job.processes_per_node, "process")
        note(f"one command per node, {processes} each; all nodes must see {job.run_dir}")
        if job.master_addr == ADDRESS_TO_FILL_IN:
            note(f"put the address of node 0 for {ADDRESS_TO_FILL_IN}, or give it with --master-addr")
    record = launch_record(job)
    if json:
        print_json(asdict(record))
        return
    for command in record.commands:
        if job.num_nodes > 1:
            sys.stdout.write(f"# node {command.node}\n")
        sys.stdout.write(command.shell + "\n")


def _explain(job: Job, *, json: bool) -> None:
    """Print all variables of the job on stdout (--explain)."""
    from rich.console import Console

    from fcp_cli.launching.job.explain import explanation_document, explanation_table

    if json:
        print_json(explanation_document(job))
    else:
        console = Console(highlight=False)
        console.print(explanation_table(job, console.width))
