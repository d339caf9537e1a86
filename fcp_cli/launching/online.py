"""Planning settings for `fcp launch --online`."""

from __future__ import annotations

from fcp_cli.console import Assumptions
from fcp_cli.errors import UsageError
from fcp_cli.launching.request import LOCAL, STREAM_OPTIONS, LaunchRequest
from fcp_cli.plan.metadata.online import OnlineOptions, OnlineSettings
from fcp_cli.planning.fcp.solver import solver_of
from fcp_cli.planning.online.settings import stream_batching, stream_metadata
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.problem_settings import FOLDER_PROFILE, resolve_problem
from fcp_cli.planning.settings.recipe_search import unknown_lengths


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
    given = {name: value for name in STREAM_OPTIONS if (value := getattr(request, name)) is not None}
    options = OnlineOptions(**given)
    metadata = stream_metadata(problem, solver_of(problem), request.global_batch_size, batching)
    return OnlineSettings(metadata=metadata, options=options)
