"""Metadata of plans that do not exist yet: assumed by a dry run, or requested later by the training loop."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fcp_cli.errors import UsageError
from fcp_cli.launching.job import unmade_plan
from fcp_cli.launching.request import LOCAL, LaunchRequest
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import OnlineOptions, OnlineSettings, PlanMetadata, PlanningWish
from fcp_cli.planning.candidates import solver_of
from fcp_cli.planning.online import stream_batching, stream_metadata
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.recipe import unknown_lengths
from fcp_cli.planning.settings import FOLDER_PROFILE, resolve_problem
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import LocalDevices


def assumed_plan(plan: Path, model: str, ranks: int | None, manifest: Path, assumed: Assumptions) -> PlanMetadata:
    """Return the metadata of the plan that `fcp plan` would make for a model.

    Args:
        plan: path of the plan.
        model: shipped name or description.
        ranks: number of ranks; None: one per device of this machine, or of the example cluster.
        manifest: manifest of the plan.
        assumed: records the assumptions and the command that makes the plan.
    """
    from fcp_cli.planning.settings import ASSUMED_GLOBAL_BATCH_SIZE, computed_basis

    name = load_model(model).name
    found = Assumptions()
    profile, shape, budget = computed_basis(PlanRequest(model=model, ranks=ranks), found)
    words = ["fcp", "plan", str(manifest), "--model", name]
    words += [] if ranks is None else ["--ranks", str(ranks)]
    assumed.assume("--plan", plan, f"not there yet; make it with: {shlex.join([*words, '-o', str(plan)])}")
    for setting in ("--cluster", "--ranks", "recipe"):
        if setting in found.assumed:
            assumed.assumed[setting] = found.assumed[setting]
    unmade = unmade_plan(
        ranks=shape.num_ranks,
        ranks_per_node=shape.ranks_per_node,
        sync=budget.sync,
        tokens_per_rank=budget.tokens_per_rank,
    )
    return replace(
        unmade,
        global_batch_size=ASSUMED_GLOBAL_BATCH_SIZE,
        manifest=replace(unmade.manifest, name=manifest.name),
        cost_profile=profile.text,
        recipe=budget.recipe,
    )


def is_assumed(metadata: PlanMetadata) -> bool:
    """Return whether the plan is only assumed: a real plan has a hash."""
    return not metadata.plan_hash


def has_plan_made(request: LaunchRequest, target: str, plan: Path) -> bool:
    """Return whether the training loop will request its plan: a local script with hooks and without a plan.

    Args:
        request: the user's request.
        target: launch target.
        plan: default path of a plan.
    """
    given = request.plan is not None or request.online or bool(request.manifest)
    if not request.program or given or plan.is_file():
        return False
    return target == LOCAL and request.inject in (None, "entry") and request.launcher == "torchrun"


def unplanned_job(
    request: LaunchRequest, find_machine: Callable[[], LocalDevices]
) -> tuple[PlanMetadata, PlanningWish, Callable[[], LocalDevices]]:
    """Return placeholder metadata with the job's ranks, the options of its later plan, and a finder of its machine."""
    machine = find_machine()
    here = request.ranks if machine.device == "cpu" else machine.num_devices
    nodes = request.nodes or 1
    ranks = request.ranks or (here or 0) * nodes
    if not ranks:
        raise UsageError(
            "there is no accelerator and no plan here; give the number of CPU processes (--ranks 4), or a plan, "
            "which has one: --plan PLAN"
        )
    metadata = unmade_plan(ranks=ranks, ranks_per_node=max(1, ranks // nodes))
    profile, model = None if request.profile is None else str(request.profile.absolute()), request.model
    if model is not None and Path(model).exists():  # valid on every node, like a shipped name
        model = str(Path(model).absolute())
    return metadata, PlanningWish(model=model, profile=profile), lambda: machine


# Planning settings for `fcp launch --online`.


def online_settings(request: LaunchRequest, target: str, assumed: Assumptions) -> OnlineSettings:
    """Return the settings with which a script plans its stream online."""
    if not request.program:
        raise UsageError(
            "--online is for a script of your own, given after --; the bundled trainer knows its lengths before: "
            "plan them with 'fcp plan'"
        )
    if request.plan is not None:
        raise UsageError("--plan is followed, --online makes one in the run directory; give one of them")
    if target != LOCAL:
        raise UsageError(f"--online starts a job from here; remove --target {target}, or start it on each node")
    if request.model is None and request.profile is None and not FOLDER_PROFILE.is_file():
        raise UsageError(
            "--online prices steps before the script has made its model: name it with --model NAME|FILE|FOLDER, or "
            "give measured times with --profile FILE"
        )
    wanted = PlanRequest(profile=request.profile, model=request.model, ranks=request.ranks)
    problem, _budget = resolve_problem(wanted, assumed, data=unknown_lengths())
    batching = stream_batching(request.global_batch_size, request.global_batch_tokens)
    metadata = stream_metadata(problem, solver_of(problem), request.global_batch_size, batching)
    return OnlineSettings(metadata=metadata, options=OnlineOptions())
