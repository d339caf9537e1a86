"""Settings of the bundled trainer; model, data and run directory default to the plan's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from fcp_cli.cost.recipe import check_shard_ranks
from fcp_cli.errors import ProfileError, RunError, UsageError
from fcp_cli.launching import preflight
from fcp_cli.launching.assumed_plan import is_assumed
from fcp_cli.launching.job import Job, planned_profile
from fcp_cli.launching.memory_check import check_recipe_of_plan
from fcp_cli.launching.request import LOCAL, LaunchRequest
from fcp_cli.models.model import known_model, load_model
from fcp_cli.models.weights import find_weights, has_weights
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.runs.run_dir import RunPaths, next_run_dir, read_launch
from fcp_cli.training.settings import TrainSettings, require_libraries
from fcp_cli.util.console import Assumptions
from fcp_cli.util.validation import validated

_PATHS: Final = (
    "weights",
    "eval_manifest",
    "eval_plan",
)  # TrainSettings fields that a launch record stores as text


def trainer_settings(request: LaunchRequest, job: Job, assumed: Assumptions) -> TrainSettings:
    """Return the bundled trainer's settings with defaults applied, after checking that it can run.

    Args:
        request: the user's request.
        job: job with plan and machines.
        assumed: records the defaults.
    """
    plan, metadata = job.plan, job.metadata
    runs_here = job.target == LOCAL and not request.dry_run
    preflight.check_trainer(metadata, plan, needs_transformers=runs_here)
    model = _model(request.model, metadata, assumed)
    if request.plan is None and not is_assumed(metadata):
        assumed.assume("--plan", plan, "it is in this folder")
    evaluation = _evaluation(request)
    settings = TrainSettings(
        plan=plan.absolute(),
        model=model,
        weights=_weights(request, model, assumed),
        random_weights=_wants_random_weights(request),
        manifest=() if request.synthetic else _manifests(request, plan, metadata, assumed),
        run_dir=run_dir_of(request, Path(model).stem).absolute(),
        resume=request.resume,
        **{name: value for name, value in request.training.items() if name not in (*_PATHS, "random_weights")},
        eval_manifest=evaluation.get("eval_manifest"),
        eval_plan=evaluation.get("eval_plan"),
    )
    recipe = settings.recipe(metadata.recipe, sync=metadata.sync, device=job.machine.device)
    if runs_here:
        require_libraries(recipe, settings)
        _check_tokenizer(settings)
    check_shard_ranks(recipe, metadata.num_ranks)
    check_recipe_of_plan(job, settings)
    if metadata.recipe is None:
        _note_vision(metadata, settings, assumed)
    if not is_assumed(metadata):
        preflight.check_steps(plan, metadata, settings.steps)
    if request.resume:
        preflight.check_resumable(
            settings.run_dir,
            read_launch(settings.run_dir),
            metadata,
            settings.steps,
            accepts_unrecorded=settings.accept_unrecorded,
        )
    else:
        preflight.check_beginning(plan, metadata)
    return settings


def _model(given: str | None, metadata: PlanMetadata, assumed: Assumptions) -> str:
    """Return the given model; it defaults to that of the plan's cost profile."""
    planned = planned_profile(metadata).get("model")
    if given is None and planned is None:
        raise UsageError(
            "name the model to train with --model, for example --model qwen3-tiny, or give a script after --"
        )
    if given is None:
        if known_model(str(planned)) is None:
            raise UsageError(
                f"the plan was made for the model {planned}, of which there is no folder here; name it with "
                "--model FOLDER"
            )
        assumed.assume("--model", planned, "the plan's cost profile")
    return given or str(planned)


def recorded_settings(training: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the trainer settings of a launch record, after validating their types."""
    of_paths = {Path: str, Path | None: str | None, tuple[Path, ...]: tuple[str, ...]}
    kinds = [(name, of_paths.get(kind, kind), None) for name, kind in get_type_hints(TrainSettings).items()]
    shape = make_dataclass("RecordedSettings", kinds, kw_only=True)
    validated(training, shape, where=f"{path} is damaged: training", error=RunError)
    return training


def model_of_run(run_dir: Path, model: str | None) -> str | None:
    """Return the model of a resumed run; if its folder is gone, the copy of its configuration in the run directory."""
    kept = RunPaths(run_dir=run_dir).origin
    if model is None or not (kept / "config.json").is_file():
        return model
    try:
        load_model(model)
    except ProfileError:
        return str(kept.absolute())
    return model


def _wants_random_weights(request: LaunchRequest) -> bool:
    given = request.training.get("weights")
    return request.training.get("random_weights", False) if given is None else str(given) == "random"


def _weights(request: LaunchRequest, model: str, assumed: Assumptions) -> Path | None:
    """Return the folder of the initial weights, which defaults to the model's; None: random weights."""
    given, is_random = request.training.get("weights"), _wants_random_weights(request)
    folder = Path(model if given is None else given)
    if is_random or (given is None and not has_weights(folder)):
        if not is_random:
            assumed.assume(
                "--weights", "random", "--weights FOLDER, or a checkpoint's folder as --model, starts from one"
            )
        return None
    # A resumed run reads its own checkpoint, so the initial weights may be gone.
    is_read = not (request.resume and request.run_dir and checkpoints(RunPaths(run_dir=request.run_dir).checkpoints))
    if is_read and importlib.util.find_spec("safetensors") is not None:
        find_weights(folder)
    if given is None:
        assumed.assume("--weights", folder, "the model is a checkpoint")
    return folder.absolute()


def _check_tokenizer(settings: TrainSettings) -> None:
    """Raise RunError if a manifest's tokenizer differs from the trained checkpoint's."""
    from fcp_cli.training.data import check_tokenizer

    for manifest in filter(None, (*settings.manifest, settings.eval_manifest)):
        if settings.weights is not None and manifest.exists():
            check_tokenizer(manifest, settings.weights)


def _evaluation(request: LaunchRequest) -> dict[str, Path]:
    """Return the paths of the evaluation manifest and plan, if given, after validating them."""
    from fcp_cli.manifest.read import read_manifest
    from fcp_cli.manifest.tokens import open_media
    from fcp_cli.training.data import has_tokens

    found = {name: Path(request.training[name]).absolute() for name in _PATHS[1:3] if request.training.get(name)}
    manifest, plan = found.get("eval_manifest"), found.get("eval_plan")
    if plan is not None:
        read_proven(plan)
    if manifest is None:
        return found
    length_column = request.training.get("length_column", "length")
    read_manifest(manifest, length_column=length_column)
    if not has_tokens(manifest, length_column=length_column) and open_media(manifest) is None:
        raise RunError(f"--eval-manifest {manifest} holds lengths only, no source of tokens to compute losses of")
    return found


def _note_vision(metadata: PlanMetadata, settings: TrainSettings, assumed: Assumptions) -> None:
    """Record a note if only one of plan and run freezes the vision encoder."""
    planned = (planned_profile(metadata).get("measurement") or {}).get("freeze_vision")
    if planned is not None and planned != settings.freeze_vision:
        kinds = ("a trained", "a frozen")
        remedy = "fcp profile --analytic --freeze-vision" if settings.freeze_vision else "fcp profile --analytic"
        assumed.assume(
            "cost profile",
            f"that of {kinds[planned]} vision encoder",
            f"the run has {kinds[not planned]} one; {remedy}",
        )


def _manifests(request: LaunchRequest, plan: Path, metadata: PlanMetadata, assumed: Assumptions) -> tuple[Path, ...]:
    """Return the plan's manifests from which tokens are read; () for random tokens."""
    from fcp_cli.manifest.tokens import open_media
    from fcp_cli.planning.batches import mixed_manifests, one_manifest
    from fcp_cli.training.data import has_tokens, require_texts

    mixture = metadata.mixture
    names = [metadata.manifest.name] if mixture is None else [source.name for source in mixture.sources]
    near = [next((path for path in (plan.parent / name, Path(name)) if path.exists()), None) for name in names]
    manifests = request.manifest or tuple(path for path in near if path is not None)
    if not manifests and is_assumed(metadata):
        assumed.assume("--manifest", names[0], "not there yet: 'fcp manifest build' makes it")
        return (Path(names[0]).absolute(),)
    if not request.manifest and None in near:
        named = "it" if mixture is None else f"each of {', '.join(names)}"
        raise RunError(
            f"{plan} was made from {names[near.index(None)]}, which is not next to it; name {named} with --manifest, "
            "or train on random tokens with --synthetic"
        )
    length_column = request.training.get("length_column", "length")
    if mixture is not None:
        manifests = tuple(mixed_manifests(mixture, manifests, length_column=length_column))
        require_texts(manifests)
    elif (manifest := one_manifest(metadata, manifests)) and not is_assumed(metadata):
        _check_manifest(manifest, length_column, plan, metadata, request.model)
    kept = RunPaths(run_dir=request.run_dir).origin if request.resume and request.run_dir is not None else None
    for manifest in manifests:
        if has_tokens(manifest, length_column=length_column, kept=kept):
            continue
        if mixture is not None:
            raise RunError(
                f"{manifest} holds lengths only, no source of tokens; build it from its texts, or train on random "
                "tokens with --synthetic"
            )
        if open_media(manifest) is None:
            assumed.assume("tokens", "random", f"{manifest} holds lengths only, no source of tokens")
            return ()
        assumed.assume("text and pixels", "random", f"{manifest} holds sizes of images and videos only")
        return (manifest.absolute(),)
    if not request.manifest:
        assumed.assume("--manifest", " ".join(map(str, manifests)), "the plan was made from it")
    return tuple(manifest.absolute() for manifest in manifests)


def _check_manifest(manifest: Path, length_column: str, plan: Path, metadata: PlanMetadata, model: str | None) -> None:
    """Raise RunError if the plan was made from another manifest, whose rows would be trained silently."""
    from fcp_cli.manifest.read import read_manifest

    if read_manifest(manifest, length_column=length_column).content_hash() != metadata.manifest.content_hash:
        again = plan_again(metadata, plan, manifest=str(manifest), given_model=model)
        raise RunError(
            f"{manifest} is not the manifest that {plan} was made from, or it was changed since; name the right "
            f"one with --manifest, or plan again with: {again}"
        )


def run_dir_of(request: LaunchRequest, name: str) -> Path:
    """Return the given run directory, or a new one; raise RunError if a new run would overwrite another."""
    run_dir = request.run_dir or next_run_dir(name)
    paths = RunPaths(run_dir=run_dir)
    may_exist = request.program or request.resume or request.node_rank  # node 0 may have started earlier
    if not may_exist and (paths.metrics.exists() or paths.checkpoints.exists()):
        raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another --run-dir")
    return run_dir
