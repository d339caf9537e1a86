"""The metadata of a plan that does not exist yet, so that a dry run can print the whole command of a job."""

from __future__ import annotations

import shlex
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.console import Assumptions
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata.plan_metadata import ManifestReference, PlanMetadata
from fcp_cli.planning.settings.options import PlanRequest


def assumed_plan(plan: Path, model: str, ranks: int | None, manifest: Path, assumed: Assumptions) -> PlanMetadata:
    """Return the metadata of the plan that `fcp plan` would make for a model.

    Args:
        plan: the plan where the plan would be.
        model: shipped name, or a description.
        ranks: the ranks, as given, else one per device: of this machine, or of the example cluster if it has none.
        manifest: the manifest that it would be made from.
        assumed: receives all of it, with the command that makes the plan.
    """
    from fcp_cli.planning.settings.settings import (  # slow to import, rarely needed
        ASSUMED_GLOBAL_BATCH_SIZE,
        computed_basis,
    )

    name = load_model(model).name
    found = Assumptions()
    profile, shape, budget = computed_basis(PlanRequest(model=model, ranks=ranks), found)
    words = ["fcp", "plan", str(manifest), "--model", name]
    words += [] if ranks is None else ["--ranks", str(ranks)]
    assumed.assume("--plan", plan, f"not there yet; make it with: {shlex.join([*words, '-o', str(plan)])}")
    for setting in ("--cluster", "--ranks", "recipe"):
        if setting in found.assumed:
            assumed.assumed[setting] = found.assumed[setting]
    return PlanMetadata(
        fcp_version=__version__,
        num_ranks=shape.num_ranks,
        ranks_per_node=shape.ranks_per_node,
        sync=budget.sync,
        global_batch_size=ASSUMED_GLOBAL_BATCH_SIZE,
        tokens_per_rank=budget.tokens_per_rank,
        seed=0,
        shuffle=True,
        solver="",
        manifest=ManifestReference(name=manifest.name, rows=0, content_hash=""),
        cost_profile=profile.text,
        recipe=budget.recipe,
    )


def is_assumed(metadata: PlanMetadata) -> bool:
    """Return whether there is no file behind it: a plan that was made has a hash."""
    return not metadata.plan_hash
