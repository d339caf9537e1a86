"""Resolves the options of a launch to its job, once: applies defaults, validates, and records assumptions.

The order is that of a user's decisions: the run to resume, the program, the plan, the machines, the run directory, the
trainer's settings, the environment, and the files of a cluster.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias, get_type_hints

from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.errors import PlanError, ProfileError, RunError, UsageError
from fcp_cli.launching import refusals
from fcp_cli.launching.commands import hooked_environment, probe_variable
from fcp_cli.launching.environment import job_variables, set_by_fcp
from fcp_cli.launching.job import (
    ADDRESS_TO_FILL_IN,
    MODEL_VARIABLE,
    TRAINER,
    Job,
    check_ranks,
    is_assumed,
    place,
    planned_nodes,
    planned_profile,
    unmade_plan,
)
from fcp_cli.launching.memory_check import check_recipe_of_plan
from fcp_cli.launching.program import is_mindspore_script, python_program, split_program, through_entry
from fcp_cli.launching.request import LOCAL, LaunchRequest
from fcp_cli.launching.target_options import choose_target, cluster_machine, for_cluster, hosts_of, refuse_local_options
from fcp_cli.models.model import known_model, load_model
from fcp_cli.models.weights import find_weights, has_weights
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import OTHER_BATCHES_VARIABLE, OnlineOptions, OnlineSettings, PlanMetadata, PlanningWish
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.runs.run_dir import RunPaths, followed_plan, latest_run_dir, next_run_dir, read_launch
from fcp_cli.training.settings import TrainSettings, require_libraries
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import USUAL_MANIFESTS, as_word, manifest_here
from fcp_cli.util.machine import LocalDevices, find_machine_without_torch
from fcp_cli.util.network import free_ports, interface_towards
from fcp_cli.util.validation import validated

DEFAULT_PLAN = Path("plan.parquet")
Claim: TypeAlias = Callable[[Path | None, str], Path]
"""Returns the run directory, given its path, or None and the name after which a new one is numbered.

Called before anything in the directory is read, so that a launch can take ownership of it.
"""
# Recipe settings that a new plan may change within a run; which weights are trained may not.
_RECIPE_SETTINGS = frozenset(field.name for field in fields(RecipeRequest)) - {"freeze_vision", "lora", "freeze"}
_PATHS: Final = ("weights", "eval_manifest", "eval_plan")  # TrainSettings fields that a launch record stores as text


def unclaimed(run_dir: Path | None, name: str) -> Path:
    """Return the run directory of a launch that starts nothing."""
    return run_dir or next_run_dir(name)


def resolve(
    request: LaunchRequest,
    find_machine: Callable[[], LocalDevices],
    assumed: Assumptions,
    claim: Claim = unclaimed,
) -> Job:
    """Return the job of a request, with defaults applied; nothing is written.

    Args:
        request: the options, as typed.
        find_machine: detects this machine; slow, so called after the plan has been validated, and once.
        assumed: records the defaults.
        claim: returns the run directory.

    Raises:
        FcpError: the request is invalid, or its plan is.
    """
    if request.resume and not request.program and request.run_dir is None:
        request = replace(request, run_dir=latest_run_dir(request.model))
        assumed.assume("--run-dir", request.run_dir, "the run that was launched last")
    if request.run_dir is not None and (request.run_dir.is_dir() or not request.resume):
        claim(request.run_dir, "")
    if request.resume and not request.program:
        request = _as_before(request, request.run_dir or Path())
    needs_torch = True
    if request.program:
        python = request.cluster.python or sys.executable
        starts_nothing = request.dry_run or request.output is not None
        words = python_program(request.program, assumed, python=python, may_be_elsewhere=starts_nothing)
        request, needs_torch = replace(request, program=words), not is_mindspore_script(Path(words[0]))
    if not needs_torch:
        request = _for_mindspore(request, assumed)
        find_machine = partial(find_machine_without_torch, request.device)
    find_machine = cache(find_machine)
    target = choose_target(request.cluster)
    runs_here = target == LOCAL and not request.dry_run
    _require_model(request, target)
    unplanned = _has_plan_made(request, target)
    plan, online, planning = DEFAULT_PLAN, None, None
    if request.online:
        online = _online_settings(request, target, assumed)
        metadata = online.metadata
    else:
        _refuse_without_online(request, has_profile=unplanned)
        if unplanned:
            metadata, planning = _unplanned(request, find_machine())
        else:
            plan, metadata = _plan(request, assumed)
            check_ranks(plan, metadata, request.ranks, request.model)
            if request.program and request.plan is None:
                reason = "it is in this folder; elsewhere, a trainer's script gets a plan of its own"
                assumed.assume("--plan", plan, reason)

    hosts = hosts_of(request.cluster, request.nodes)
    nodes = request.nodes
    if target != LOCAL:
        refuse_local_options(target, node_rank=request.node_rank, master_addr=request.master_addr)
        nodes = nodes or len(hosts) or planned_nodes(metadata)
    device = request.training.get("device", request.device)  # a resumed run keeps its device
    machine = find_machine() if target == LOCAL else None
    if machine is None or (request.dry_run and device == "auto" and metadata.num_devices > machine.most_ranks):
        machine = cluster_machine(device, metadata, find_machine, assumed)
    num_nodes, processes_per_node = place(plan, metadata, machine, nodes=nodes, must_fit=runs_here, model=request.model)
    if runs_here:
        refusals.check_nodes(num_nodes, request.node_rank, request.master_addr, request.run_dir)
    if (planned := planned_nodes(metadata)) != num_nodes:
        here = "this machine" if num_nodes == 1 else f"{num_nodes} nodes"
        assumed.assume(
            "--nodes", num_nodes, f"the plan is for {planned}: its times between nodes do not hold on {here}"
        )
    kernel = request.attention_kernel
    if kernel != "auto" and machine.device in ("cpu", "npu"):
        raise UsageError(f"--attention-kernel {kernel} is for NVIDIA devices, and this job runs on {machine.device}")
    if request.numa_binding is not None and request.launcher != "torchrun":
        raise UsageError("--numa-binding is torchrun's; do not use it with --launcher msrun")
    node_rank = request.node_rank if request.dry_run and num_nodes > 1 else request.node_rank or 0
    # On one node, torchrun finds a free port; msrun's scheduler needs one, and torch's rendezvous the next.
    needs_ports = request.launcher == "msrun" and num_nodes == 1 and target == LOCAL

    settings = None
    if request.program:
        program, arguments = split_program(request.program)
        run_dir = (request.run_dir or claim(None, Path(program[-1]).stem)).absolute()
        if request.inject != "none":
            program, arguments = through_entry(request.program)
    else:
        settings = _trainer_settings(request, plan, metadata, claim, assumed, runs_here=runs_here)
        program, arguments, run_dir = TRAINER, tuple(settings.argv()), settings.run_dir
    job = Job(
        plan=plan if online is None and planning is None else RunPaths(run_dir=run_dir).plan,
        metadata=metadata,
        machine=machine,
        run_dir=run_dir,
        num_nodes=num_nodes,
        processes_per_node=processes_per_node,
        node_rank=node_rank if target == LOCAL else None,
        program=program,
        arguments=arguments,
        settings=settings,
        model=request.model if settings is None else settings.model,
        needs_torch=needs_torch,
        environment={} if settings is not None else _for_script(request),
        hosts=hosts,
        master_addr=request.master_addr or (hosts[0] if hosts else ADDRESS_TO_FILL_IN),
        master_port=free_ports(request.master_port, count=2) if needs_ports else request.master_port,
        # Cluster nodes start when scheduled, so they keep the launcher's default.
        join_timeout_seconds=request.join_timeout if target == LOCAL else None,
        rank_timeout_seconds=request.rank_timeout,
        attention_kernel=kernel,
        numa_binding=request.numa_binding,
        grace_seconds=request.grace or 0,
        launcher=request.launcher,
        target=target,
        online=online,
        planning=planning,
    )
    if request.grace is None:
        job = replace(job, grace_seconds=job.needed_grace_seconds)
    if settings is not None:
        _check_training(job, settings, assumed, runs_here=runs_here)
    # Interfaces are only known on the nodes themselves, not where commands are printed for them.
    is_one_of_several = job.num_nodes > 1 and job.node_rank is not None
    interface = interface_towards(job.master_addr) if is_one_of_several else None
    variables = job_variables(job, os.environ, interface=interface)
    if request.program and request.inject != "none":
        probe = probe_variable(run_dir=run_dir, plan_hash=metadata.plan_hash, given=os.environ)
        variables = (probe, *variables)
    job = replace(job, variables=variables, environment={**job.environment, **set_by_fcp(variables)})
    output = None if request.output is None else request.output.absolute()
    return job if target == LOCAL else for_cluster(request.cluster, job, output, assumed)


def resolve_own_command(request: LaunchRequest) -> dict[str, str]:
    """Return the environment with hooks for a command that starts its own ranks, after checking the plan."""
    plan, metadata = _plan(replace(request, dry_run=False), Assumptions())
    check_ranks(plan, metadata, request.ranks, request.model)
    run_dir = request.run_dir or next_run_dir(Path(request.program[0]).stem)
    probe = probe_variable(run_dir=run_dir, plan_hash=metadata.plan_hash, given=os.environ)
    return {**hooked_environment(plan=plan, run_dir=run_dir, probe=probe), **_for_script(replace(request, model=None))}


def _for_script(request: LaunchRequest) -> dict[str, str]:
    """Return the variables that options set for a script."""
    asked = {MODEL_VARIABLE: request.model, OTHER_BATCHES_VARIABLE: "1" if request.accept_other_batches else None}
    return {name: value for name, value in asked.items() if value is not None}


def _require_model(request: LaunchRequest, target: str) -> None:
    """Raise ProfileError for an unknown --model; a path may exist only on the job's nodes."""
    if request.model is None or Path(request.model).exists():
        return
    is_elsewhere = "/" in request.model and (target != LOCAL or request.dry_run)
    if not is_elsewhere:
        load_model(request.model)


def _refuse_without_online(request: LaunchRequest, *, has_profile: bool) -> None:
    """Raise UsageError for options of online jobs; --profile is also valid if the loop requests its plan."""
    names = (*(() if has_profile else ("profile",)), "global_batch_size", "global_batch_tokens")
    for name in (name for name in names if getattr(request, name) is not None):
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag} is for --online; a plan has its own: fcp plan MANIFEST --{flag} ...")


def _for_mindspore(request: LaunchRequest, assumed: Assumptions) -> LaunchRequest:
    """Disable injection, since msrun's scheduler process also runs the script; raise UsageError under torchrun."""
    script = request.program[0]
    if request.launcher != "msrun":
        raise UsageError(f"{script} imports mindspore, whose ranks meet only under msrun; add --launcher msrun")
    if request.inject != "none":
        assumed.assume("--inject", "none", f"{script} imports mindspore, and msrun's scheduler has to run it, too")
    return replace(request, inject="none")


def _as_before(request: LaunchRequest, run_dir: Path) -> LaunchRequest:
    """Return the request with plan, data, model and settings defaulting to those of the resumed run."""
    before = read_launch(run_dir)
    if before.training is None:
        raise RunError(
            f"{run_dir} ran {' '.join(before.program)}, which resumes by its own means; launch it again after --"
        )
    training = recorded_settings(before.training, RunPaths(run_dir=run_dir).launch)
    if request.plan is not None:  # a new plan has its own recipe
        training = {name: value for name, value in training.items() if name not in _RECIPE_SETTINGS}
    return replace(
        request,
        plan=request.plan or followed_plan(run_dir, before),
        model=request.model or model_of_run(run_dir, before.model),
        manifest=request.manifest or before.manifests,
        synthetic=request.synthetic or not (request.manifest or before.manifests),
        training={**training, **request.training},
    )


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


# The plan: read, assumed by a dry run, or made later by the training loop.


def _plan(request: LaunchRequest, assumed: Assumptions) -> tuple[Path, PlanMetadata]:
    """Return the given or default plan; a dry run with --model may assume one."""
    plan = request.plan or DEFAULT_PLAN
    if request.node_rank and not request.dry_run and not plan.is_file():
        raise PlanError(f"node {request.node_rank} has no plan {plan}; copy node 0's there: all nodes follow one plan")
    if request.plan is not None or plan.is_file():
        return plan, read_proven(plan)
    manifest = next(iter(request.manifest), None) or manifest_here()
    if request.dry_run and request.model is not None:
        return DEFAULT_PLAN, _assumed_plan(
            DEFAULT_PLAN, request.model, request.ranks, manifest or Path(USUAL_MANIFESTS[0]), assumed
        )
    raise PlanError(
        f"there is no {DEFAULT_PLAN} here; make one with 'fcp plan {as_word(manifest or 'MANIFEST')} "
        f"-o {DEFAULT_PLAN}', or name one with --plan"
    )


def _assumed_plan(plan: Path, model: str, ranks: int | None, manifest: Path, assumed: Assumptions) -> PlanMetadata:
    """Return the metadata of the plan that `fcp plan` would make for a model.

    Args:
        plan: path of the plan.
        model: shipped name or description.
        ranks: number of ranks; None: one per device of this machine, or of the example cluster.
        manifest: manifest of the plan.
        assumed: records the assumptions and the command that makes the plan.
    """
    from fcp_cli.planning.options import PlanRequest
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


def _has_plan_made(request: LaunchRequest, target: str) -> bool:
    """Return whether the training loop will request its plan: a local script with hooks and without a plan."""
    given = request.plan is not None or request.online or bool(request.manifest)
    if not request.program or given or DEFAULT_PLAN.is_file():
        return False
    return target == LOCAL and request.inject in (None, "entry") and request.launcher == "torchrun"


def _unplanned(request: LaunchRequest, machine: LocalDevices) -> tuple[PlanMetadata, PlanningWish]:
    """Return placeholder metadata with the job's ranks, and the options of its later plan."""
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
    return metadata, PlanningWish(model=model, profile=profile)


def _online_settings(request: LaunchRequest, target: str, assumed: Assumptions) -> OnlineSettings:
    """Return the settings with which a script plans its stream online."""
    from fcp_cli.planning.fcp_solver import solver_of
    from fcp_cli.planning.online import stream_batching, stream_metadata
    from fcp_cli.planning.options import PlanRequest
    from fcp_cli.planning.recipe import unknown_lengths
    from fcp_cli.planning.settings import FOLDER_PROFILE, resolve_problem

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


# Settings of the bundled trainer; model, data and run directory default to the plan's.


def _trainer_settings(
    request: LaunchRequest,
    plan: Path,
    metadata: PlanMetadata,
    claim: Claim,
    assumed: Assumptions,
    *,
    runs_here: bool,
) -> TrainSettings:
    """Return the bundled trainer's settings with defaults applied."""
    refusals.check_trainer(metadata, plan, needs_transformers=runs_here)
    model = _model(request.model, metadata, assumed)
    if request.plan is None and not is_assumed(metadata):
        assumed.assume("--plan", plan, "it is in this folder")
    evaluation = _evaluation(request)
    weights = _weights(request, model, assumed)
    manifest = () if request.synthetic else _manifests(request, plan, metadata, assumed)
    run_dir = request.run_dir or claim(None, Path(model).stem)
    paths = RunPaths(run_dir=run_dir)
    may_exist = request.resume or request.node_rank  # node 0 may have started earlier
    if not may_exist and (paths.metrics.exists() or paths.checkpoints.exists()):
        raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another --run-dir")
    return TrainSettings(
        plan=plan.absolute(),
        model=model,
        weights=weights,
        random_weights=_wants_random_weights(request),
        manifest=manifest,
        run_dir=run_dir.absolute(),
        resume=request.resume,
        **{name: value for name, value in request.training.items() if name not in (*_PATHS, "random_weights")},
        eval_manifest=evaluation.get("eval_manifest"),
        eval_plan=evaluation.get("eval_plan"),
    )


def _check_training(job: Job, settings: TrainSettings, assumed: Assumptions, *, runs_here: bool) -> None:
    """Check that the bundled trainer can follow the job's plan with these settings."""
    plan, metadata = job.plan, job.metadata
    recipe = settings.recipe(metadata.recipe, sync=metadata.sync, device=job.machine.device)
    if runs_here:
        require_libraries(recipe, settings)
        _check_tokenizer(settings)
    check_recipe_of_plan(job, settings)
    if metadata.recipe is None:
        _note_vision(metadata, settings, assumed)
    if not is_assumed(metadata):
        refusals.check_steps(plan, metadata, settings.steps)
    if settings.resume:
        refusals.check_resumable(
            settings.run_dir,
            read_launch(settings.run_dir),
            metadata,
            settings.steps,
            accepts_unrecorded=settings.accept_unrecorded,
        )
    else:
        refusals.check_beginning(plan, metadata)


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


def _wants_random_weights(request: LaunchRequest) -> bool:
    given = request.training.get("weights")
    return request.training.get("random_weights", False) if given is None else str(given) == "random"


def _weights(request: LaunchRequest, model: str, assumed: Assumptions) -> Path | None:
    """Return the folder of the initial weights, which defaults to the model's; None: random weights."""
    given, is_random = request.training.get("weights"), _wants_random_weights(request)
    folder = Path(model if given is None else given)
    if is_random or (given is None and not has_weights(folder)):
        if not is_random and not request.resume:
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
