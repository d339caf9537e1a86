"""The environment of a job that is not launched: for programs that measure or test under a job's environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.launching.job.environment import job_variables
from fcp_cli.launching.job.job import Job, Variable
from fcp_cli.machine.devices import LocalDevices
from fcp_cli.plan.metadata.plan_metadata import ManifestReference, PlanMetadata, Sync


def variables_like_a_job(
    machine: LocalDevices,
    given: Mapping[str, str],
    *,
    model: str,
    sync: Sync,
    ranks: int,
    nodes: int,
    tokens_per_rank: int,
) -> tuple[Variable, ...]:
    """Return the variables of a job of the bundled trainer with a rank per device.

    Args:
        machine: kind of device, and cores.
        given: the user's environment, which wins.
        model: shipped name, or a description; its keys and values size buffers.
        sync: the sync of the plan that the job would follow.
        ranks: the ranks on all nodes.
        nodes: machines; with several, each finds its own network interface, so that variables of them have no value.
        tokens_per_rank: the token budget.
    """
    metadata = PlanMetadata(
        fcp_version=__version__,
        num_ranks=ranks,
        ranks_per_node=ranks // nodes,
        sync=sync,
        global_batch_size=1,
        tokens_per_rank=tokens_per_rank,
        seed=0,
        shuffle=False,
        solver="",
        manifest=ManifestReference(name="", rows=0, content_hash=""),
        cost_profile="",
    )
    job = Job(
        plan=Path(),
        metadata=metadata,
        machine=machine,
        run_dir=Path(),
        num_nodes=nodes,
        processes_per_node=ranks // nodes,
        model=model,
    )
    return job_variables(job, given)
