"""Predicted duration of a job, printed before it starts."""

from __future__ import annotations

from fcp_cli.errors import PlanError
from fcp_cli.launching.job.job import Job
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.words import counted, duration


def predicted_time(job: Job) -> str | None:
    """Return a line about a step and the steps that are left to run; None if the plan predicts nothing."""
    try:
        steps, seconds = PlanReader(job.plan).predicted_seconds()
    except PlanError:  # an assumed plan, which is not there yet
        return None
    last = job.settings.steps if job.settings is not None else None
    if last is not None:
        seconds = seconds[steps < last]
    if not len(seconds) or not seconds.sum():
        return None
    basis = {"analytic": ", computed and not measured"}.get(job.profile.origin if job.profile is not None else "", "")
    return (
        f"planned: a step takes {duration(float(seconds.mean()))}, {counted(len(seconds), 'step')} "
        f"{duration(float(seconds.sum()))}{basis}"
    )
