"""A job whose plan its training loop has made when training begins: `fcp launch -- train.py`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.errors import UsageError
from fcp_cli.launching.request import LOCAL, LaunchRequest
from fcp_cli.machine.devices import LocalDevices
from fcp_cli.plan.metadata.job_facts import PlanningWish
from fcp_cli.plan.metadata.plan_metadata import ManifestReference, PlanMetadata


def has_plan_made(request: LaunchRequest, target: str, plan: Path) -> bool:
    """Return whether a job's training loop has its plan made: a script that runs here with hooks, without a plan.

    Args:
        request: the request of the user.
        target: the target where the job runs.
        plan: the plan that would be followed if none is named.
    """
    given = request.plan is not None or request.online or bool(request.manifest)
    if not request.program or given or plan.is_file():
        return False
    return target == LOCAL and request.inject in (None, "entry") and request.launcher == "torchrun"


def unplanned_job(
    request: LaunchRequest, find_machine: Callable[[], LocalDevices]
) -> tuple[PlanMetadata, PlanningWish, Callable[[], LocalDevices]]:
    """Return the ranks of a job as metadata of a plan that is not made yet, its options, and its machine."""
    machine = find_machine()
    here = request.ranks if machine.device == "cpu" else machine.num_devices
    nodes = request.nodes or 1
    ranks = request.ranks or (here or 0) * nodes
    if not ranks:
        raise UsageError("there is no accelerator here, so say how many CPU processes train: --ranks 4")
    metadata = PlanMetadata(
        fcp_version=__version__,
        num_ranks=ranks,
        ranks_per_node=max(1, ranks // nodes),
        sync="iteration",
        global_batch_size=1,
        tokens_per_rank=1,
        seed=0,
        shuffle=True,
        solver="",
        manifest=ManifestReference(name="", rows=0, content_hash=""),
        cost_profile="",
    )
    profile = None if request.profile is None else str(request.profile.absolute())
    return metadata, PlanningWish(model=_model(request.model), profile=profile), lambda: machine


def _model(name: str | None) -> str | None:
    """Return a model as every node finds it: by its shipped name, or by the path of a file or folder that is here."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name
