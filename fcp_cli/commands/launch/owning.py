"""The run folder of a launch, owned before anything in it is read or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fcp_cli.console import note

if TYPE_CHECKING:
    from fcp_cli.launching.job.job import Job
    from fcp_cli.launching.request import LaunchRequest
    from fcp_cli.runs.ownership import Ownership


@contextmanager
def owned_job(options: LaunchRequest, resolve: Callable[[LaunchRequest], Job]) -> Iterator[tuple[Job, Ownership]]:
    """Yield the job of the options, and its run folder, which this process owns."""
    from fcp_cli.runs.ownership import own

    with ExitStack() as stack:
        owned = _own_named(options)
        if owned is not None:
            stack.enter_context(owned)
        job = resolve(options)
        while owned is None or owned.run_dir.absolute() != job.run_dir:
            is_automatic = options.run_dir is None and not options.resume
            try:
                owned = stack.enter_context(
                    own(
                        job.run_dir,
                        node=options.node_rank or 0,
                        job=_job_of(options),
                        must_be_new=is_automatic,
                        announce=note,
                    )
                )
            except FileExistsError:  # another launch has just taken this number
                job = resolve(options)
                continue
            if not owned.is_new:  # another job made it, and may have ended there, since it was looked at
                job = resolve(options)
        yield job, owned


def _own_named(options: LaunchRequest) -> Ownership | None:
    """Acquire the folder that the options name, if it exists."""
    from fcp_cli.runs.launch_record import latest_run_dir
    from fcp_cli.runs.ownership import own

    run_dir = options.run_dir
    if run_dir is None and options.resume and not options.program:
        run_dir = latest_run_dir(options.model)
    if run_dir is None or not run_dir.is_dir():
        return None
    return own(run_dir, node=options.node_rank or 0, job=_job_of(options), announce=note)


def _job_of(options: LaunchRequest) -> str:
    """Return the same text on all nodes of a job that is launched on each of them."""
    return f"{options.nodes} nodes at {options.master_addr}:{options.master_port}" if options.master_addr else ""
