"""`fcp launch`: run a training job under a plan, here or as one command per node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from fcp_cli.commands.launch.cluster import launch_cluster_job
from fcp_cli.commands.launch.resolving import find_problems, refuse_unused, resolve_request, run_preflight, show_finding
from fcp_cli.commands.launch.running import run_here
from fcp_cli.commands.launch.showing import print_commands, print_explanation
from fcp_cli.console import print_json
from fcp_cli.errors import UsageError

if TYPE_CHECKING:
    from fcp_cli.launching.job.inject import Inject
    from fcp_cli.launching.request import LaunchRequest

_TRAINER = "Bundled trainer"
_NODES = "Several nodes"
_CLUSTER = "Clusters"


def launch(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT ARGS", help="Your own script (or -m MODULE) instead of the bundled trainer."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Shipped model, model YAML or config.json. Default: the plan's."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan to follow. Default: plan.parquet.")] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Manifest of the plan, to read tokens through. Default: beside the plan.")
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Train on random tokens of the planned lengths.")
    ] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Make sure that the plan is for so many ranks.")] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|npu", help="What the ranks run on.")] = "auto",
    run_dir: Annotated[
        Path | None, typer.Option(help="Metrics, checkpoints and logs. Default: a new runs/NAME-NNN.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, with the settings of the run.")
    ] = False,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="entry|env|none", help="How a script of yours is made to follow the plan. Default: entry."
        ),
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Compare a tiny step's numbers before the first step of a Megatron script. Default: in a plan's first "
            "run.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; start and write nothing.")] = False,
    grace: Annotated[
        int,
        typer.Option(min=1, metavar="SECONDS", help="How long a step may still take after SIGTERM; then all is ended."),
    ] = 45,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each variable is set and where it comes from; start nothing.")
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check everything that a launch needs; start and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            rich_help_panel=_CLUSTER,
            help="local, scripts (ssh), slurm, pytorchjob or volcano (Kubernetes). Default: what the options tell.",
        ),
    ] = None,
    launcher: Annotated[
        Literal["torchrun", "msrun"],
        typer.Option(metavar="NAME", rich_help_panel=_CLUSTER, help="What starts a node's ranks: torchrun or msrun."),
    ] = "torchrun",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            rich_help_panel=_CLUSTER,
            help="Write the job's files there; start nothing.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel=_CLUSTER, help="Replace files that are there already.")
    ] = False,
    template: Annotated[
        Path | None,
        typer.Option(metavar="FILE.j2", rich_help_panel=_CLUSTER, help="Your own instead of the one in launchers/."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_CLUSTER, help="Nodes, one a line, node 0 first.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", rich_help_panel=_CLUSTER, help="Shell that a node runs first; may be repeated."),
    ] = None,
    sbatch_option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", rich_help_panel=_CLUSTER, help="As --partition=gpu; may be repeated."),
    ] = None,
    image: Annotated[str | None, typer.Option(rich_help_panel=_CLUSTER, help="Container image.")] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:PATH", rich_help_panel=_CLUSTER, help="Volume of a container; may be repeated."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", rich_help_panel=_CLUSTER, help="Interpreter on the nodes. Default: this one."),
    ] = None,
    job_name: Annotated[
        str | None, typer.Option(rich_help_panel=_CLUSTER, help="Default: the run directory's name.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(rich_help_panel=_NODES, help="Machines to spread the ranks over.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(rich_help_panel=_NODES, help="Which of them this is, from 0.")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(rich_help_panel=_NODES, help="Address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(rich_help_panel=_NODES, help="A free port of node 0.")] = 29500,
    join_timeout: Annotated[
        int,
        typer.Option(
            min=1, metavar="SECONDS", rich_help_panel=_NODES, help="How long the nodes wait for each other to start."
        ),
    ] = 300,
    steps: Annotated[
        int | None,
        typer.Option(rich_help_panel=_TRAINER, help="Stop after so many steps in all. Default: the plan's."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINER, help="Peak of the schedule. Default: 3e-4.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Steps of linear warm-up. Default: 10.")
    ] = None,
    decay_steps: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Where the cosine ends. Default: the plan's steps.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINER, help="Of matrices. Default: 0.1.")
    ] = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINER, help="Clip gradients to; 0: never. Default: 1.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TRAINER, metavar="float32|bfloat16", help="Of matrix products. Default: by device."
        ),
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute", rich_help_panel=_TRAINER, help="Recompute activations in backward.")
    ] = None,
    freeze_vision: Annotated[
        bool | None,
        typer.Option(
            "--freeze-vision", rich_help_panel=_TRAINER, help="Train the language model of a vision model only."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Of the initial weights. Default: 0.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Steps; 0: only at the end. Default: 100.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Newest that stay. Default: 2.")
    ] = None,
    length_column: Annotated[
        str | None, typer.Option(rich_help_panel=_TRAINER, help="Column of the manifest. Default: length.")
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(rich_help_panel=_TRAINER, help="Steps per line without a terminal. Default: 10.")
    ] = None,
) -> None:
    """Train under a plan: the bundled trainer, or your own script after --.

    Everything runs here if this machine can hold the plan's ranks; with --nodes, each node runs its part.
    Ctrl-C stops at the end of the step with a checkpoint; 'fcp launch --resume' goes on.
    """
    from fcp_cli.launching.request import LaunchRequest
    from fcp_cli.launching.targets.options import ClusterRequest

    training = {
        "steps": steps,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "dtype": dtype,
        "recompute": recompute,
        "freeze_vision": freeze_vision,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep_checkpoints,
        "length_column": length_column,
        "log_every": log_every,
    }
    request = LaunchRequest(
        plan=plan,
        manifest=manifest,
        model=model,
        ranks=ranks,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        join_timeout_seconds=join_timeout,
        run_dir=run_dir,
        resume=resume,
        synthetic=synthetic,
        program=tuple(program or ()),
        training={name: value for name, value in training.items() if value is not None},
        device=device,
        launcher=launcher,
        cluster=ClusterRequest(
            target=target,
            hostfile=hostfile,
            template=template,
            setup=tuple(setup or ()),
            sbatch_options=tuple(sbatch_option or ()),
            image=image,
            mounts=tuple(mount or ()),
            python=python,
            job_name=job_name,
        ),
        grace_seconds=grace,
        dry_run=dry_run or explain,
        inject=_inject(inject, program),
        probe=_probe(probe, program, inject),
    )
    if request.inject == "env":
        if explain or preflight:
            flag = "--explain" if explain else "--preflight"
            raise UsageError(f"{flag} is for jobs that fcp starts; --inject env sets what --dry-run shows")
        _launch_own_command(request, json=json)
    elif preflight:
        run_preflight(request, json=json)
    else:
        _launch(request, explain=explain, json=json, output=output, force=force)


def _inject(given: str | None, program: list[str] | None) -> Inject:
    if given is None:
        return "entry"
    if given not in ("entry", "env", "none"):
        raise UsageError(f"--inject is {given}; it must be entry, env or none")
    if not program:
        raise UsageError("--inject is for a script or command of your own, given after --")
    return cast("Inject", given)


def _probe(given: bool | None, program: list[str] | None, inject: str | None) -> bool | None:
    """The bundled trainer runs no code but fcp's own, which `fcp verify` compares."""
    if given is not None and not program:
        raise UsageError("--probe and --no-probe are for a script of your own, given after --; see also 'fcp verify'")
    if given and inject == "none":
        raise UsageError("--probe needs the hooks that --inject none leaves out")
    return given


def _launch_own_command(request: LaunchRequest, *, json: bool) -> None:
    from fcp_cli.launching.job.inject import become
    from fcp_cli.launching.resolve import resolve_own_command

    refuse_unused(request)
    for name in ("nodes", "node_rank", "master_addr"):
        if getattr(request, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for jobs that fcp starts; tell it to {request.program[0]}")
    if json and not request.dry_run:
        raise UsageError("--json with --inject env needs --dry-run: the output of the command is its own")
    command = resolve_own_command(request)
    if not request.dry_run:
        become(command)
    elif json:
        print_json({"argv": command.argv, "environment": command.environment, "shell": command.shell})
    else:
        sys.stdout.write(command.shell + "\n")


def _launch(request: LaunchRequest, *, explain: bool, json: bool, output: Path | None, force: bool) -> None:
    job = resolve_request(request)
    if explain:
        print_explanation(job, json=json)
        return
    if force and output is None:
        raise UsageError("--force replaces files in the folder of -o; give that, too")
    if output is not None and job.cluster is None:
        raise UsageError("-o writes the files of a cluster job; name one with --target, or see --dry-run")
    findings = find_problems(job)
    for finding in findings:
        show_finding(finding)
    if any(finding.severity == "error" for finding in findings) and not request.dry_run:
        raise typer.Exit(1)
    if job.cluster is not None:
        template = request.cluster.template
        launch_cluster_job(job, template=template, output=output, force=force, dry_run=request.dry_run, json=json)
    elif request.dry_run:
        print_commands(job, json=json)
    else:
        run_here(job, json=json)
