"""Ownership of the run directory of a launch, acquired before anything in it is read or changed."""

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
    """Yield the resolved job and the ownership of its run directory."""
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
            except FileExistsError:  # a concurrent launch took this automatic run number
                job = resolve(options)
                continue
            if not owned.is_new:  # its state may have changed since the job was resolved
                job = resolve(options)
        yield job, owned


def _own_named(options: LaunchRequest) -> Ownership | None:
    """Own the run directory named or implied by the options; None if it does not exist yet."""
    from fcp_cli.runs.launch_record import latest_run_dir
    from fcp_cli.runs.ownership import own

    run_dir = options.run_dir
    if run_dir is None and options.resume and not options.program:
        run_dir = latest_run_dir(options.model)
    if run_dir is None or not run_dir.is_dir():
        return None
    return own(run_dir, node=options.node_rank or 0, job=_job_of(options), announce=note)


def _job_of(options: LaunchRequest) -> str:
    """Return a job id that is equal on all nodes of a multi-node launch; "" on a single node."""
    return f"{options.nodes} nodes at {options.master_addr}:{options.master_port}" if options.master_addr else ""
