"""From the typed request to what is launched, and what may be wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from fcp_cli.console import Origins, note, print_error, print_json
from fcp_cli.errors import FcpError, RunError, UsageError

if TYPE_CHECKING:
    from fcp_cli.launching.checks import Finding
    from fcp_cli.launching.job.job import Job
    from fcp_cli.launching.request import LaunchRequest
    from fcp_cli.machine.devices import Machine


def resolve_request(request: LaunchRequest) -> Job:
    """Complete what was typed, and say what was assumed."""
    from fcp_cli.launching.resolve import resolve

    refuse_unused(request)
    device = request.device
    if device != "auto" and not request.program:
        request = replace(request, training={"device": device, **request.training})
    assumed = Origins()
    job = resolve(request, lambda: _find_machine(device, dry_run=request.dry_run), assumed)
    assumed.report()
    return job


def refuse_unused(request: LaunchRequest) -> None:
    """An option that would do nothing is a misunderstanding."""
    given = [*request.training, *(name for name in ("manifest", "synthetic", "resume") if getattr(request, name))]
    if request.program and given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} is for the bundled trainer; give {request.program[0]} its own arguments after it")


def _find_machine(device: str, *, dry_run: bool) -> Machine:
    from fcp_cli.machine.devices import UNKNOWN_MACHINE, find_machine

    try:
        return find_machine(device)
    except RunError as error:
        if not dry_run:
            raise
        note(f"{error}; the commands are for the nodes that the plan was made for")
        return UNKNOWN_MACHINE if device == "auto" else replace(UNKNOWN_MACHINE, device=device)


def find_problems(job: Job) -> list[Finding]:
    """What would make the job fail or be slow, here and in its environment."""
    from fcp_cli.launching.checks import check_launch
    from fcp_cli.launching.checks.reach import collect_job_facts

    return check_launch(job, collect_job_facts(job))


def show_finding(finding: Finding) -> None:
    if finding.severity == "error":
        print_error(finding.message)
    else:
        note(f"warning: {finding.message}")


def run_preflight(request: LaunchRequest, *, json: bool) -> None:
    """Only the checks; exit status 1 if one of them would stop the launch."""
    from fcp_cli.launching.checks import Finding
    from fcp_cli.launching.checks.preflight import check_space

    try:
        job = resolve_request(request)
        check_space(job.run_dir, job.parameters, job.kept_checkpoints)
        findings = find_problems(job)
    except UsageError:
        raise
    except FcpError as error:  # nothing can be checked beyond it
        findings = [Finding(severity="error", message=str(error))]
    errors = sum(finding.severity == "error" for finding in findings)
    if json:
        print_json({"findings": [{"severity": f.severity, "message": f.message} for f in findings]})
    else:
        for finding in findings:
            show_finding(finding)
        counts = f"errors: {errors}, warnings: {len(findings) - errors}"
        note(f"preflight: {counts if findings else 'all is well'}")
    if errors:
        raise typer.Exit(1)
