"""From what the user typed to what is launched: fills in what was not said, and says what it assumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fcp_cli.console import Origins
from fcp_cli.errors import PlanError, RunError, UsageError
from fcp_cli.launching import preflight
from fcp_cli.launching.machine import Machine
from fcp_cli.launching.placement import Placement, check_ranks, place, planned_nodes
from fcp_cli.launching.run_dirs import latest_run_dir, next_run_dir, read_launch
from fcp_cli.launching.spec import TRAINER, LaunchSpec, RunPaths
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.profiling.models import load_model
from fcp_cli.training.settings import TrainSettings

DEFAULT_PLAN = Path("plan.parquet")
# What a manifest is called by `fcp manifest build` and in the documentation.
_USUAL_MANIFESTS = ("lengths.parquet", "dataset.parquet")
# Stands for an address that only the reader of a printed command knows.
ADDRESS_TO_FILL_IN = "NODE0_ADDRESS"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What was typed; None is what was not.

    Attributes:
        program: the script and its arguments after `--`, or `-m module` and its arguments; empty: the bundled trainer.
        training: settings of the bundled trainer that were given, by field of `TrainSettings`.
        synthetic: train on random tokens.
        dry_run: nothing is started or written.
    """

    plan: Path | None = None
    manifest: Path | None = None
    model: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29500
    run_dir: Path | None = None
    resume: bool = False
    synthetic: bool = False
    program: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A resolved request.

    Attributes:
        spec: what is started.
        node_rank: this machine's number; None prints the commands of all nodes.
        metadata: of the plan.
        settings: of the bundled trainer; None for a script.
        parameters: of the model, for checks of space; 0 where it is not known.
    """

    spec: LaunchSpec
    node_rank: int | None
    metadata: PlanMetadata
    settings: TrainSettings | None
    parameters: int = 0


def resolve(request: LaunchRequest, find_machine: Callable[[], Machine], assumed: Origins) -> Launch:
    """Complete a request and check it; nothing is written.

    Args:
        request: what was typed.
        find_machine: looks at this machine; called once the plan is known to be good, because it is slow.
        assumed: is told what was filled in.

    Raises:
        FcpError: the plan, the data, the model, the machine or the command line is at fault.
    """
    if request.resume and not request.program:
        request = _as_before(request, assumed)
    plan = _plan(request)
    metadata = preflight.check_plan(plan)
    check_ranks(plan, metadata, request.ranks)
    machine = find_machine()
    placement = place(plan, metadata, machine, nodes=request.nodes, must_fit=not request.dry_run)
    if not request.dry_run:
        preflight.check_nodes(placement.num_nodes, request.node_rank, request.master_addr, request.run_dir)
    _tell_about_nodes(metadata, placement.num_nodes, assumed)
    settings = None if request.program else _settings(request, plan, metadata, assumed)
    spec = LaunchSpec(
        plan=plan.absolute(),
        run_dir=(settings.run_dir if settings is not None else _run_dir(request, _program_name(request))).absolute(),
        num_nodes=placement.num_nodes,
        processes_per_node=placement.processes_per_node,
        program=TRAINER if settings is not None else _program(request),
        arguments=tuple(settings.argv()) if settings is not None else _program_arguments(request),
        environment=_environment(request, machine, placement),
        master_addr=request.master_addr or ADDRESS_TO_FILL_IN,
        master_port=request.master_port,
        python=sys.executable,
    )
    parameters = _parameters(settings)
    if settings is not None and not request.dry_run:
        preflight.check_memory(
            settings.model,
            parameters,
            machine,
            ranks_here=placement.processes_per_node,
            sharded_over=metadata.num_ranks if metadata.sync == "microbatch" else 1,
        )
    return Launch(spec=spec, node_rank=request.node_rank, metadata=metadata, settings=settings, parameters=parameters)


def _as_before(request: LaunchRequest, assumed: Origins) -> LaunchRequest:
    """A resumed run keeps the plan, the data, the model and the settings it had, unless told otherwise."""
    run_dir = request.run_dir or latest_run_dir(request.model)
    if request.run_dir is None:
        assumed.assume("--run-dir", run_dir, "the run that was launched last")
    before = read_launch(run_dir)
    if before["training"] is None:
        raise RunError(
            f"{run_dir} ran {' '.join(before['program'])}, which resumes by its own means; launch it again after --"
        )
    return replace(
        request,
        run_dir=run_dir,
        plan=request.plan or Path(before["plan"]),
        model=request.model or before["model"],
        manifest=request.manifest or (Path(before["manifest"]) if before["manifest"] else None),
        synthetic=request.synthetic or (request.manifest is None and before["manifest"] is None),
        training={**before["training"], **request.training},
    )


def _plan(request: LaunchRequest) -> Path:
    if request.plan is not None:
        return request.plan
    if not DEFAULT_PLAN.is_file():
        manifest = next((name for name in _USUAL_MANIFESTS if Path(name).is_file()), "MANIFEST")
        raise PlanError(
            f"there is no {DEFAULT_PLAN} here; make one with 'fcp plan {manifest} -o {DEFAULT_PLAN}', "
            "or name one with --plan"
        )
    return DEFAULT_PLAN


def _settings(request: LaunchRequest, plan: Path, metadata: PlanMetadata, assumed: Origins) -> TrainSettings:
    """What the bundled trainer is told."""
    preflight.check_trainer(metadata, plan, needs_transformers=not request.dry_run)
    model = _model(request.model, metadata, assumed)
    if request.plan is None:
        assumed.assume("--plan", plan, "it is in this folder")
    settings = TrainSettings(
        plan=plan.absolute(),
        model=model,
        manifest=None if request.synthetic else _manifest(request, plan, metadata, assumed),
        run_dir=_run_dir(request, Path(model).stem).absolute(),
        resume=request.resume,
        **request.training,
    )
    preflight.check_steps(plan, metadata, settings.steps)
    if request.resume:
        preflight.check_resumable(settings.run_dir, read_launch(settings.run_dir), metadata, settings.steps)
    return settings


def _model(given: str | None, metadata: PlanMetadata, assumed: Origins) -> str:
    """The model that was named, else the one whose cost profile the plan was made with."""
    planned = _planned_model(metadata)
    if given is None and planned is None:
        raise UsageError(
            "name the model to train with --model, for example --model qwen3-tiny, or give a script after --"
        )
    if given is None:
        assumed.assume("--model", planned, "the plan's cost profile")
    elif planned is not None and planned != load_model(given).name:
        assumed.assume("cost profile", f"that of {planned}", f"the plan's predicted times are not for {given}")
    return given or str(planned)


def _planned_model(metadata: PlanMetadata) -> str | None:
    try:
        profile = yaml.safe_load(metadata.cost_profile)
    except yaml.YAMLError:
        return None
    return profile.get("model") if isinstance(profile, dict) else None


def _manifest(request: LaunchRequest, plan: Path, metadata: PlanMetadata, assumed: Origins) -> Path | None:
    """The manifest to read tokens through; None trains on random ones."""
    from fcp_cli.training.data import has_tokens

    name = metadata.manifest.name
    beside = (plan.parent / name, Path(name))
    manifest = request.manifest or next((path for path in beside if path.exists()), None)
    if manifest is None:
        raise RunError(
            f"{plan} was made from {name}, which is not beside it; say where it is with --manifest, or train on random "
            "tokens with --synthetic"
        )
    length_column = request.training.get("length_column", "length")
    _check_manifest(manifest, length_column, plan, metadata)
    if not has_tokens(manifest, length_column=length_column):
        assumed.assume("tokens", "random", f"{manifest} holds lengths only, no source of tokens")
        return None
    if request.manifest is None:
        assumed.assume("--manifest", manifest, "the plan was made from it")
    return manifest.absolute()


def _check_manifest(manifest: Path, length_column: str, plan: Path, metadata: PlanMetadata) -> None:
    """The plan's sequences are rows of one manifest; another one would be trained in silence."""
    from fcp_cli.manifest.read import read_manifest

    if read_manifest(manifest, length_column=length_column).content_hash() != metadata.manifest.content_hash:
        raise RunError(
            f"{manifest} is not the manifest that {plan} was made from, or it was changed since; plan again with "
            f"'fcp plan {manifest} -o {plan}', or name the right one with --manifest"
        )


def _run_dir(request: LaunchRequest, name: str) -> Path:
    run_dir = request.run_dir or next_run_dir(name)
    paths = RunPaths(run_dir=run_dir)
    may_exist = request.program or request.resume or request.node_rank  # node 0 may have begun before this one looks
    if not may_exist and (paths.metrics.exists() or paths.checkpoints.exists()):
        raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another --run-dir")
    return run_dir


def _program(request: LaunchRequest) -> tuple[str, ...]:
    first, *rest = request.program
    if first == "-m":
        if not rest:
            raise UsageError("-m after -- needs the name of a module")
        return ("-m", rest[0])
    if first.startswith("-"):
        raise UsageError(f"after -- comes a script or '-m MODULE', not {first}; the trainer's options go before --")
    if not Path(first).is_file():
        raise UsageError(f"there is no script {first}")
    return (first,)


def _program_arguments(request: LaunchRequest) -> tuple[str, ...]:
    return request.program[2 if request.program[0] == "-m" else 1 :]


def _program_name(request: LaunchRequest) -> str:
    return Path(_program(request)[-1]).stem


def _environment(request: LaunchRequest, machine: Machine, placement: Placement) -> dict[str, str]:
    environment = {}
    if request.program and request.model is not None:
        environment["FCP_MODEL"] = request.model
    if machine.device == "cpu" and placement.num_nodes == 1 and "OMP_NUM_THREADS" not in os.environ:
        # torchrun would give each rank a single thread; other machines' cores are not known here.
        environment["OMP_NUM_THREADS"] = str(machine.threads_per_rank(placement.processes_per_node))
    return environment


def _tell_about_nodes(metadata: PlanMetadata, num_nodes: int, assumed: Origins) -> None:
    planned = planned_nodes(metadata)
    if planned != num_nodes:
        here = "this machine" if num_nodes == 1 else f"{num_nodes} nodes"
        assumed.assume(
            "--nodes", num_nodes, f"the plan is for {planned}: its times between nodes do not hold on {here}"
        )


def _parameters(settings: TrainSettings | None) -> int:
    """Of the bundled trainer's model; 0 for a script, whose model is its own business."""
    return 0 if settings is None else load_model(settings.model).text_parameters
