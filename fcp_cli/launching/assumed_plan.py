"""The metadata of a plan that does not exist yet, so that a dry run can print the whole command of a job."""

from __future__ import annotations

import shlex
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.console import Origins
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.models.shipped import EXAMPLE_CLUSTER, shipped_profile_path
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.planning.settings import ASSUMED_GLOBAL_BATCH_SIZE, ASSUMED_TOKENS_PER_RANK


def assumed_plan(plan: Path, model: str, ranks: int | None, manifest: Path, assumed: Origins) -> PlanMetadata:
    """Return the metadata of a plan for a model on the example cluster.

    Args:
        plan: where the plan would be.
        model: shipped name, or a description.
        ranks: as given, else the cluster's devices.
        manifest: that it would be made from.
        assumed: receives all of it, with the command that makes the plan.

    Raises:
        ProfileError: there is no such model.
    """
    cluster = load_cluster(EXAMPLE_CLUSTER)
    name = load_model(model).name
    num_ranks = ranks or cluster.num_devices
    per_node = min(cluster.devices_per_node, num_ranks)
    profile_command = ["fcp", "profile", "--analytic", "--model", name, "--cluster", EXAMPLE_CLUSTER]
    plan_command = ["fcp", "plan", str(manifest), "--ranks", str(num_ranks), "--ranks-per-node", str(per_node)]
    commands = (shlex.join([*profile_command, "-o", "profile.yaml"]), shlex.join([*plan_command, "-o", str(plan)]))
    assumed.assume("--plan", plan, f"not there yet; make it with: {' && '.join(commands)}")
    if ranks is None:
        assumed.assume("--ranks", num_ranks, f"{cluster.nodes} nodes of {per_node}: the cluster {cluster.name}")
    profile = shipped_profile_path(model)
    return PlanMetadata(
        fcp_version=__version__,
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        sync="iteration",
        global_batch_size=ASSUMED_GLOBAL_BATCH_SIZE,
        tokens_per_rank=ASSUMED_TOKENS_PER_RANK,
        seed=0,
        shuffle=True,
        solver="",
        manifest=ManifestReference(name=manifest.name, rows=0, content_hash=""),
        cost_profile=profile.read_text(encoding="utf-8") if profile.is_file() else f"model: {name}\n",
    )


def is_assumed(metadata: PlanMetadata) -> bool:
    """Return whether there is no file behind it: a plan that was made has a hash."""
    return not metadata.plan_hash
