"""From what the user typed to what is launched: fills in what was not said, and says what it assumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fcp_cli.console import Origins
from fcp_cli.errors import PlanError, RunError
from fcp_cli.launching import preflight
from fcp_cli.launching.assumed_plan import assumed_plan
from fcp_cli.launching.environment import Variable, job_variables, set_by_fcp
from fcp_cli.launching.inject import OwnCommand, own_command, probe_variable
from fcp_cli.launching.job import Job
from fcp_cli.launching.placement import Placement, check_ranks, place, planned_nodes
from fcp_cli.launching.program import for_mindspore, is_mindspore, program_arguments, program_name, started_program
from fcp_cli.launching.request import LaunchRequest, run_dir_of
from fcp_cli.launching.spec import MODEL_VARIABLE, TRAINER, LaunchSpec
from fcp_cli.launching.targets.catalog import LOCAL
from fcp_cli.launching.targets.job import ClusterJob
from fcp_cli.launching.targets.request import (
    choose_target,
    cluster_machine,
    complete_job,
    hosts_of,
    refuse_local_options,
)
from fcp_cli.launching.trainer_settings import trainer_settings
from fcp_cli.machine.devices import Machine, find_machine_without_torch
from fcp_cli.machine.network import free_ports, interface_towards
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.launch_record import latest_run_dir, read_launch
from fcp_cli.training.settings import TrainSettings

DEFAULT_PLAN = Path("plan.parquet")
# What a manifest is called by `fcp manifest build` and in the documentation.
_USUAL_MANIFESTS = ("lengths.parquet", "dataset.parquet")
# Stands for an address that only the reader of a printed command knows.
ADDRESS_TO_FILL_IN = "NODE0_ADDRESS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A resolved request.

    Attributes:
        spec: what is started.
        node_rank: this machine's number; None prints the commands of all nodes.
        metadata: of the plan.
        settings: of the bundled trainer; None for a script.
        parameters: of the model, for checks of space; 0 where it is not known.
        job, machine: what the environment and the preflight depend on.
        variables: the environment of the job's stack, with reasons.
        target: where it runs: `local`, or one of `targets.catalog.TARGETS`.
        cluster_job: what its files are made of; None for `local`.
    """

    spec: LaunchSpec
    node_rank: int | None
    metadata: PlanMetadata
    settings: TrainSettings | None
    parameters: int = 0
    job: Job
    machine: Machine
    variables: tuple[Variable, ...] = ()
    target: str = LOCAL
    cluster_job: ClusterJob | None = None

    @property
    def kept_checkpoints(self) -> int:
        """How many the run directory needs space for; 0 for a script, whose checkpoints are its own business."""
        return self.settings.keep_checkpoints if self.settings is not None else 0


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
    if is_mindspore(request):
        request = for_mindspore(request, assumed)
    target = choose_target(request.cluster)
    plan, metadata = _plan(request, assumed)
    check_ranks(plan, metadata, request.ranks)
    hosts = hosts_of(request.cluster, request.nodes)
    nodes = request.nodes
    if target != LOCAL:
        refuse_local_options(target, node_rank=request.node_rank, master_addr=request.master_addr)
        nodes = nodes or len(hosts) or planned_nodes(metadata)
    machine = _machine(request, target, metadata, find_machine, assumed)
    placement = place(plan, metadata, machine, nodes=nodes, must_fit=request.runs_here)
    if request.runs_here:
        preflight.check_nodes(placement.num_nodes, request.node_rank, request.master_addr, request.run_dir)
    _tell_about_nodes(metadata, placement.num_nodes, assumed)
    if request.launcher == "msrun" and placement.num_nodes == 1 and target == LOCAL:
        # torchrun finds a free port by itself. msrun needs one for its scheduler, and torch the next.
        request = replace(request, master_port=free_ports(request.master_port, count=2))
    settings = None if request.program else trainer_settings(request, plan, metadata, assumed)
    job = _job(request, plan, metadata, machine, placement, settings, hosts)
    run_dir = settings.run_dir if settings is not None else run_dir_of(request, program_name(request))
    variables = (
        *_probe_variables(request, run_dir, metadata),
        *job_variables(job, machine, os.environ, interface=_interface(job)),
    )
    program, arguments = (TRAINER, tuple(settings.argv())) if settings is not None else started_program(request)
    spec = LaunchSpec(
        plan=plan.absolute(),
        run_dir=run_dir.absolute(),
        num_nodes=placement.num_nodes,
        processes_per_node=placement.processes_per_node,
        program=program,
        arguments=arguments,
        environment={**_model_variable(request), **set_by_fcp(variables)},
        master_addr=request.master_addr or ADDRESS_TO_FILL_IN,
        master_port=request.master_port,
        # Nodes of a cluster's job start when the cluster has them, so they keep the launcher's own patience.
        join_timeout_seconds=request.join_timeout_seconds if target == LOCAL else None,
        grace_seconds=request.grace_seconds,
        python=sys.executable,
        launcher=request.launcher,
    )
    parameters = _parameters(settings)
    if settings is not None and request.runs_here:
        preflight.check_memory(
            settings.model,
            parameters,
            machine,
            ranks_here=placement.processes_per_node,
            sharded_over=metadata.num_ranks if metadata.sync == "microbatch" else 1,
        )
    return Launch(
        spec=spec,
        node_rank=request.node_rank,
        metadata=metadata,
        settings=settings,
        parameters=parameters,
        job=job,
        machine=machine,
        variables=variables,
        target=target,
        cluster_job=_cluster_job(request, target, spec, variables, machine, hosts, assumed),
    )


def resolve_own_command(request: LaunchRequest) -> OwnCommand:
    """For a command that starts the ranks itself: check the plan, and complete its environment.

    Raises:
        FcpError: the plan or the command line is at fault.
    """
    plan, metadata = _plan(replace(request, dry_run=False), Origins())
    check_ranks(plan, metadata, request.ranks)
    run_dir = run_dir_of(request, Path(request.program[0]).stem)
    (probe,) = _probe_variables(request, run_dir, metadata)
    return own_command(request.program, plan=plan, run_dir=run_dir, probe=probe)


def _probe_variables(request: LaunchRequest, run_dir: Path, metadata: PlanMetadata) -> tuple[Variable, ...]:
    """None for what is not hooked: the bundled trainer, or a script without hooks."""
    if not request.program or request.inject == "none":
        return ()
    return (probe_variable(request.probe, run_dir=run_dir, plan_hash=metadata.plan_hash, given=os.environ),)


def _machine(
    request: LaunchRequest,
    target: str,
    metadata: PlanMetadata,
    find_machine: Callable[[], Machine],
    assumed: Origins,
) -> Machine:
    """This machine, unless the job is for others: for a cluster, or a dry run of more ranks than this one holds."""
    if is_mindspore(request):
        find_machine = partial(find_machine_without_torch, request.device)
    device = request.training.get("device", request.device)  # a resumed run keeps the one it had
    if target == LOCAL:
        machine = find_machine()
        if not request.dry_run or device != "auto" or metadata.num_devices <= machine.most_ranks:
            return machine
    return cluster_machine(device, metadata, find_machine, assumed)


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
        plan=request.plan or _plan_of_run(run_dir, before),
        model=request.model or before["model"],
        manifest=request.manifest or (Path(before["manifest"]) if before["manifest"] else None),
        synthetic=request.synthetic or (request.manifest is None and before["manifest"] is None),
        training={**before["training"], **request.training},
    )


def _plan_of_run(run_dir: Path, before: Mapping[str, Any]) -> Path:
    """The run's own copy: the file that it was made from may be another plan by now."""
    copy = RunPaths(run_dir=run_dir).plan
    return copy if copy.is_file() else Path(before["plan"])


def _plan(request: LaunchRequest, assumed: Origins) -> tuple[Path, PlanMetadata]:
    """The plan that was named or lies here; a dry run does without, where the model tells what it would be."""
    if request.plan is not None or DEFAULT_PLAN.is_file():
        plan = request.plan or DEFAULT_PLAN
        return plan, preflight.check_plan(plan)
    manifest = request.manifest or next((Path(name) for name in _USUAL_MANIFESTS if Path(name).is_file()), None)
    if request.dry_run and request.model is not None:
        return DEFAULT_PLAN, assumed_plan(
            DEFAULT_PLAN, request.model, request.ranks, manifest or Path(_USUAL_MANIFESTS[0]), assumed
        )
    raise PlanError(
        f"there is no {DEFAULT_PLAN} here; make one with 'fcp plan {manifest or 'MANIFEST'} -o {DEFAULT_PLAN}', "
        "or name one with --plan"
    )


def _job(
    request: LaunchRequest,
    plan: Path,
    metadata: PlanMetadata,
    machine: Machine,
    placement: Placement,
    settings: TrainSettings | None,
    hosts: tuple[str, ...],
) -> Job:
    return Job(
        plan=plan,
        metadata=metadata,
        stack=machine.device,
        num_nodes=placement.num_nodes,
        processes_per_node=placement.processes_per_node,
        node_rank=_own_node(request, placement),
        master_addr=request.master_addr or (hosts[0] if hosts else ADDRESS_TO_FILL_IN),
        master_port=request.master_port,
        model=settings.model if settings is not None else request.model,
        arguments=program_arguments(request) if settings is None else (),
        is_bundled=settings is not None,
        launcher=request.launcher,
        needs_torch=not is_mindspore(request),
        hosts=hosts,
    )


def _cluster_job(
    request: LaunchRequest,
    target: str,
    spec: LaunchSpec,
    variables: tuple[Variable, ...],
    machine: Machine,
    hosts: tuple[str, ...],
    assumed: Origins,
) -> ClusterJob | None:
    if target == LOCAL:
        return None
    return complete_job(request.cluster, target, spec, variables, device=machine.device, hosts=hosts, assumed=assumed)


def _own_node(request: LaunchRequest, placement: Placement) -> int | None:
    """This machine's number among the nodes; None where it is none of them."""
    if choose_target(request.cluster) != LOCAL:
        return None
    return request.node_rank if request.dry_run and placement.num_nodes > 1 else request.node_rank or 0


def _interface(job: Job) -> str | None:
    """Only a node itself knows its interfaces; a machine that prints commands for others does not."""
    return interface_towards(job.master_addr) if job.num_nodes > 1 and job.node_rank is not None else None


def _model_variable(request: LaunchRequest) -> dict[str, str]:
    return {MODEL_VARIABLE: request.model} if request.program and request.model is not None else {}


def _tell_about_nodes(metadata: PlanMetadata, num_nodes: int, assumed: Origins) -> None:
    planned = planned_nodes(metadata)
    if planned != num_nodes:
        here = "this machine" if num_nodes == 1 else f"{num_nodes} nodes"
        assumed.assume(
            "--nodes", num_nodes, f"the plan is for {planned}: its times between nodes do not hold on {here}"
        )


def _parameters(settings: TrainSettings | None) -> int:
    """Of the bundled trainer's model; 0 for a script, whose model is its own business."""
    return 0 if settings is None else load_model(settings.model).parameters
