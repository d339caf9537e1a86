"""Resolves the options of a launch to a job: applies defaults, validates, and records assumptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from fcp_cli.cost.recipe import KernelChoice, RecipeRequest
from fcp_cli.errors import PlanError, RunError, UsageError
from fcp_cli.launching import preflight
from fcp_cli.launching.assumed_plan import assumed_plan, has_plan_made, unplanned_job
from fcp_cli.launching.commands import (
    for_mindspore,
    hooked_environment,
    is_mindspore,
    probe_variable,
    program_name,
    started_program,
)
from fcp_cli.launching.console_scripts import python_program
from fcp_cli.launching.environment import job_variables, set_by_fcp
from fcp_cli.launching.job import ADDRESS_TO_FILL_IN, MODEL_VARIABLE, Job, Variable, check_ranks, place, planned_nodes
from fcp_cli.launching.request import LOCAL, LaunchRequest, NumaBinding
from fcp_cli.launching.target_options import choose_target, cluster_machine, for_cluster, hosts_of, refuse_local_options
from fcp_cli.launching.trainer_settings import model_of_run, recorded_settings, run_dir_of, trainer_settings
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.run_dir import RunPaths, followed_plan, latest_run_dir, read_launch
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import USUAL_MANIFESTS, manifest_here
from fcp_cli.util.machine import LocalDevices, find_machine_without_torch
from fcp_cli.util.network import free_ports, interface_towards

DEFAULT_PLAN = Path("plan.parquet")
# Recipe settings that a new plan may change within a run; which weights are trained may not.
_RECIPE_SETTINGS = frozenset(field.name for field in fields(RecipeRequest)) - {"freeze_vision", "lora", "freeze"}


def resolve(request: LaunchRequest, find_machine: Callable[[], LocalDevices], assumed: Assumptions) -> Job:
    """Return the job of a request, with defaults applied; nothing is written.

    Args:
        request: the user's request.
        find_machine: detects this machine; slow, so called after the plan has been validated.
        assumed: records the defaults.

    Raises:
        FcpError: the request is invalid, or its plan is.
    """
    if request.resume and not request.program:
        request = _as_before(request, assumed)
    if request.program:
        python = request.cluster.python or sys.executable
        starts_nothing = request.dry_run or request.output is not None
        program = python_program(request.program, assumed, python=python, may_be_elsewhere=starts_nothing)
        request = replace(request, program=program)
    if is_mindspore(request):
        request = for_mindspore(request, assumed)
    target, planning = choose_target(request.cluster), None
    _require_model(request, target)
    unplanned = has_plan_made(request, target, DEFAULT_PLAN)
    online = None
    if request.online:
        from fcp_cli.launching.assumed_plan import online_settings  # the planner's settings are slow to import

        online = online_settings(request, target, assumed)
    else:
        _refuse_without_online(request, has_profile=unplanned)
    if unplanned:
        plan = DEFAULT_PLAN
        metadata, planning, find_machine = unplanned_job(request, find_machine)
    elif online is None:
        plan, metadata = _plan(request, assumed)
        check_ranks(plan, metadata, request.ranks, request.model)
        if request.program and request.plan is None:
            assumed.assume("--plan", plan, "it is in this folder; elsewhere, a trainer's script gets a plan of its own")
    else:
        plan, metadata = DEFAULT_PLAN, online.metadata
    job = _with_program(request, _placed(request, plan, metadata, find_machine, assumed), assumed)
    if online is not None or planning is not None:
        job = replace(job, online=online, planning=planning, plan=job.paths.plan)
    # Interfaces are only known on the nodes themselves, not where commands are printed for them.
    is_one_of_several = job.num_nodes > 1 and job.node_rank is not None
    interface = interface_towards(job.master_addr) if is_one_of_several else None
    variables = (
        *_probe_variables(request, job.run_dir, metadata),
        *job_variables(job, os.environ, interface=interface),
    )
    job = replace(job, variables=variables, environment={**job.environment, **set_by_fcp(variables)})
    return job if job.target == LOCAL else for_cluster(request.cluster, job, assumed)


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


def _placed(
    request: LaunchRequest,
    plan: Path,
    metadata: PlanMetadata,
    find_machine: Callable[[], LocalDevices],
    assumed: Assumptions,
) -> Job:
    """Return a job with plan and machines, but without program and run directory."""
    target = choose_target(request.cluster)
    hosts = hosts_of(request.cluster, request.nodes)
    nodes = request.nodes
    if target != LOCAL:
        refuse_local_options(target, node_rank=request.node_rank, master_addr=request.master_addr)
        nodes = nodes or len(hosts) or planned_nodes(metadata)
    runs_here = target == LOCAL and not request.dry_run
    machine = _machine(request, target, metadata, find_machine, assumed)
    num_nodes, processes_per_node = place(plan, metadata, machine, nodes=nodes, must_fit=runs_here, model=request.model)
    if runs_here:
        preflight.check_nodes(num_nodes, request.node_rank, request.master_addr, request.run_dir)
    planned = planned_nodes(metadata)
    if planned != num_nodes:
        here = "this machine" if num_nodes == 1 else f"{num_nodes} nodes"
        assumed.assume(
            "--nodes", num_nodes, f"the plan is for {planned}: its times between nodes do not hold on {here}"
        )
    node_rank = request.node_rank if request.dry_run and num_nodes > 1 else request.node_rank or 0
    # On one node, torchrun finds a free port; msrun's scheduler needs one, and torch's rendezvous the next.
    needs_ports = request.launcher == "msrun" and num_nodes == 1 and target == LOCAL
    return Job(
        plan=plan,
        metadata=metadata,
        machine=machine,
        run_dir=Path(),
        num_nodes=num_nodes,
        processes_per_node=processes_per_node,
        node_rank=node_rank if target == LOCAL else None,
        needs_torch=not is_mindspore(request),
        hosts=hosts,
        master_addr=request.master_addr or (hosts[0] if hosts else ADDRESS_TO_FILL_IN),
        master_port=free_ports(request.master_port, count=2) if needs_ports else request.master_port,
        # Cluster nodes start when scheduled, so they keep the launcher's default.
        join_timeout_seconds=request.join_timeout if target == LOCAL else None,
        rank_timeout_seconds=request.rank_timeout,
        attention_kernel=_attention_kernel(request, machine),
        numa_binding=_numa_binding(request),
        grace_seconds=request.grace,
        launcher=request.launcher,
        target=target,
    )


def _attention_kernel(request: LaunchRequest, machine: LocalDevices) -> KernelChoice:
    asked = request.attention_kernel
    if asked != "auto" and machine.device in ("cpu", "npu"):
        raise UsageError(f"--attention-kernel {asked} is for NVIDIA devices, and this job runs on {machine.device}")
    return asked


def _numa_binding(request: LaunchRequest) -> NumaBinding | None:
    if request.numa_binding is not None and request.launcher != "torchrun":
        raise UsageError("--numa-binding is torchrun's; do not use it with --launcher msrun")
    return request.numa_binding


def _with_program(request: LaunchRequest, job: Job, assumed: Assumptions) -> Job:
    """Add the bundled trainer or the user's program, and the run directory, to a job."""
    if not request.program:
        settings = trainer_settings(request, job, assumed)
        return replace(
            job,
            run_dir=settings.run_dir,
            settings=settings,
            model=settings.model,
            arguments=tuple(settings.argv()),
        )
    program, arguments = started_program(request)
    return replace(
        job,
        run_dir=run_dir_of(request, program_name(request)).absolute(),
        program=program,
        arguments=arguments,
        model=request.model,
        environment={} if request.model is None else {MODEL_VARIABLE: request.model},
    )


def resolve_own_command(request: LaunchRequest) -> dict[str, str]:
    """Return the environment with hooks for a command that starts its own ranks, after checking the plan."""
    plan, metadata = _plan(replace(request, dry_run=False), Assumptions())
    check_ranks(plan, metadata, request.ranks, request.model)
    run_dir = run_dir_of(request, Path(request.program[0]).stem)
    (probe,) = _probe_variables(request, run_dir, metadata)
    return hooked_environment(plan=plan, run_dir=run_dir, probe=probe)


def _probe_variables(request: LaunchRequest, run_dir: Path, metadata: PlanMetadata) -> tuple[Variable, ...]:
    """Return the probe variable; () for programs without hooks."""
    if not request.program or request.inject == "none":
        return ()
    return (probe_variable(run_dir=run_dir, plan_hash=metadata.plan_hash, given=os.environ),)


def _machine(
    request: LaunchRequest,
    target: str,
    metadata: PlanMetadata,
    find_machine: Callable[[], LocalDevices],
    assumed: Assumptions,
) -> LocalDevices:
    """Return this machine; for cluster targets, and dry runs that do not fit here, the cluster's nodes."""
    if is_mindspore(request):
        find_machine = partial(find_machine_without_torch, request.device)
    device = request.training.get("device", request.device)  # a resumed run keeps its device
    if target == LOCAL:
        machine = find_machine()
        if not request.dry_run or device != "auto" or metadata.num_devices <= machine.most_ranks:
            return machine
    return cluster_machine(device, metadata, find_machine, assumed)


def _as_before(request: LaunchRequest, assumed: Assumptions) -> LaunchRequest:
    """Return the request with plan, data, model and settings defaulting to those of the resumed run."""
    run_dir = request.run_dir or latest_run_dir(request.model)
    if request.run_dir is None:
        assumed.assume("--run-dir", run_dir, "the run that was launched last")
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
        run_dir=run_dir,
        plan=request.plan or followed_plan(run_dir, before),
        model=request.model or model_of_run(run_dir, before.model),
        manifest=request.manifest or before.manifests,
        synthetic=request.synthetic or not (request.manifest or before.manifests),
        training={**training, **request.training},
    )


def _plan(request: LaunchRequest, assumed: Assumptions) -> tuple[Path, PlanMetadata]:
    """Return the given or default plan; a dry run with --model may assume one."""
    if request.plan is not None or DEFAULT_PLAN.is_file():
        plan = request.plan or DEFAULT_PLAN
        return plan, read_proven(plan)
    manifest = next(iter(request.manifest), None) or manifest_here()
    if request.dry_run and request.model is not None:
        return DEFAULT_PLAN, assumed_plan(
            DEFAULT_PLAN, request.model, request.ranks, manifest or Path(USUAL_MANIFESTS[0]), assumed
        )
    raise PlanError(
        f"there is no {DEFAULT_PLAN} here; make one with 'fcp plan {manifest or 'MANIFEST'} -o {DEFAULT_PLAN}', "
        "or name one with --plan"
    )
