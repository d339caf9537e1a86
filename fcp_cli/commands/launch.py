"""`fcp launch`: run a training job under a plan, here or as one command per node."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcp_cli.app import app
from fcp_cli.console import Origins, human, note, print_json, verbosity
from fcp_cli.errors import Interrupted, RunError, UsageError

if TYPE_CHECKING:
    from fcp_cli.launching.failure import Failure
    from fcp_cli.launching.machine import Machine
    from fcp_cli.launching.request import Launch, LaunchRequest
    from fcp_cli.launching.run import JobOutcome

_TRAINER = "Bundled trainer"
_NODES = "Several nodes"


@app.command()
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; start and write nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    nodes: Annotated[
        int | None, typer.Option(rich_help_panel=_NODES, help="Machines to spread the ranks over.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(rich_help_panel=_NODES, help="Which of them this is, from 0.")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(rich_help_panel=_NODES, help="Address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(rich_help_panel=_NODES, help="A free port of node 0.")] = 29500,
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

    training = {
        "steps": steps,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "dtype": dtype,
        "recompute": recompute,
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
        run_dir=run_dir,
        resume=resume,
        synthetic=synthetic,
        program=tuple(program or ()),
        training={name: value for name, value in training.items() if value is not None},
        dry_run=dry_run,
    )
    _launch(request, device=device, json=json)


def _launch(request: LaunchRequest, *, device: str, json: bool) -> None:
    from fcp_cli.launching.request import resolve

    _refuse_unused(request)
    if device != "auto" and not request.program:
        request = replace(request, training={"device": device, **request.training})
    assumed = Origins()
    resolved = resolve(request, lambda: _find_machine(device, dry_run=request.dry_run), assumed)
    assumed.report()
    if request.dry_run:
        _print_commands(resolved, json=json)
    else:
        _run(resolved, json=json)


def _find_machine(device: str, *, dry_run: bool) -> Machine:
    from fcp_cli.launching.machine import UNKNOWN_MACHINE, find_machine

    try:
        return find_machine(device)
    except RunError as error:
        if not dry_run:
            raise
        note(f"{error}; the commands are for the nodes that the plan was made for")
        return UNKNOWN_MACHINE


def _refuse_unused(request: LaunchRequest) -> None:
    """An option that would do nothing is a misunderstanding."""
    given = [*request.training, *(name for name in ("manifest", "synthetic", "resume") if getattr(request, name))]
    if request.program and given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} is for the bundled trainer; give {request.program[0]} its own arguments after it")


def _print_commands(resolved: Launch, *, json: bool) -> None:
    """The result of --dry-run goes to stdout, so that it can be piped into a file or a shell."""
    from fcp_cli.launching.document import launch_document
    from fcp_cli.launching.request import ADDRESS_TO_FILL_IN

    spec = resolved.spec
    if spec.num_nodes > 1:
        note(f"one command per node, {spec.processes_per_node} processes each; all nodes must see {spec.run_dir}")
        if spec.master_addr == ADDRESS_TO_FILL_IN:
            note(f"put the address of node 0 for {ADDRESS_TO_FILL_IN}, or give it with --master-addr")
    document = launch_document(resolved)
    if json:
        print_json(document)
        return
    for command in document["commands"]:
        if spec.num_nodes > 1:
            sys.stdout.write(f"# node {command['node']}\n")
        sys.stdout.write(command["shell"] + "\n")


def _run(resolved: Launch, *, json: bool) -> None:
    from fcp_cli.launching.document import launch_document
    from fcp_cli.launching.preflight import check_run_dir
    from fcp_cli.launching.run_dirs import write_launch

    spec, node_rank = resolved.spec, resolved.node_rank or 0
    keep = resolved.settings.keep_checkpoints if resolved.settings is not None else 0
    check_run_dir(spec.run_dir, parameters=resolved.parameters, keep_checkpoints=keep)
    if node_rank == 0:
        write_launch(spec.run_dir, launch_document(resolved))
    where = "this machine" if spec.num_nodes == 1 else f"node {node_rank} of {spec.num_nodes}"
    note(f"starting {spec.processes_per_node} ranks on {where}; everything goes to {spec.run_dir}")
    outcome, watcher = _run_watched(resolved, node_rank, json=json)
    stopped_by = _stopped_by(outcome, bundled=resolved.settings is not None)
    if stopped_by is not None:
        _report_stop(resolved, stopped_by)
    if outcome.failure is not None:
        _report_failure(outcome.failure, is_shown=_shows(resolved) and outcome.failure.is_local_rank_0)
    _report_end(resolved, watcher.records, json=json)


def _shows(resolved: Launch) -> bool:
    """Rank 0 is shown on its own node; -q silences the bundled trainer, but not what a script prints on purpose."""
    return not resolved.node_rank and (resolved.settings is None or verbosity.level >= 0)


class _Watcher:
    """Follows the metrics of the bundled trainer, shows them, and keeps the step records' ends for the summary."""

    def __init__(self, resolved: Launch, *, shows: bool) -> None:
        from datetime import timezone

        from fcp_cli.training.metrics import MetricsTail
        from fcp_cli.training.progress import TrainingProgress

        every = resolved.settings.log_every if resolved.settings is not None else 1
        self._tail = MetricsTail(resolved.spec.paths.metrics, since=datetime.now(timezone.utc).isoformat())
        self._progress = TrainingProgress(human(), every=every) if shows and verbosity.level >= 0 else None
        self.records: list[dict[str, Any]] = []

    def look(self) -> None:
        for record in self._tail.poll():
            if self._progress is not None:
                self._progress.feed(record)
            if record["kind"] == "step":
                self.records = [*self.records[:1], record]

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _run_watched(resolved: Launch, node_rank: int, *, json: bool) -> tuple[JobOutcome, _Watcher]:
    from fcp_cli.launching.run import run_job

    spec, bundled = resolved.spec, resolved.settings is not None
    start = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    spec = replace(
        spec,
        log_dir=spec.paths.logs / (start if spec.num_nodes == 1 else f"{start}-node{node_rank}"),
        arguments=(*spec.arguments, *(("--quiet",) if bundled else ())),
    )
    watcher = _Watcher(resolved, shows=bundled and node_rank == 0)
    try:
        outcome = run_job(
            spec,
            node_rank=node_rank,
            shows=_shows(resolved),
            watch=watcher.look,
            announce=note,
            stdout="stderr" if json else "stdout",
        )
    finally:
        watcher.close()
    return outcome, watcher


def _stopped_by(outcome: JobOutcome, *, bundled: bool) -> signal.Signals | None:
    """The signal that ended the job before its time, if one did, here or on another node."""
    if not bundled:
        return outcome.stopped_by
    if outcome.failure is not None and outcome.failure.status == 128 + signal.SIGINT:
        return signal.SIGINT
    return outcome.stopped_by if outcome.status else None


def _report_stop(resolved: Launch, stopped_by: signal.Signals) -> None:
    from fcp_cli.launching.document import resume_command

    stopped = Interrupted(_stop_message(resolved, resume_command(resolved)))
    stopped.exit_status = 128 + stopped_by
    raise stopped


def _stop_message(resolved: Launch, resume: str) -> str:
    if resolved.settings is None:
        return "interrupted; the script was told to stop"
    checkpoints = sorted(resolved.spec.paths.checkpoints.glob("step-*/checkpoint.json"))
    if not checkpoints:
        return "interrupted before the first checkpoint; nothing was kept but the metrics"
    step = int(checkpoints[-1].parent.name.removeprefix("step-"))
    return f"interrupted; {step} steps are saved, go on with: {resume}"


def _report_failure(failure: Failure, *, is_shown: bool) -> None:
    """The failed rank's last words and one line, less what stands on the screen already."""
    if failure.message and is_shown:
        raise typer.Exit(1)
    if not failure.message and not is_shown:
        for line in failure.last_lines:
            human().print(f"  {line}", markup=False, soft_wrap=True)
    raise RunError(failure.summary())


def _report_end(resolved: Launch, records: list[dict[str, Any]], *, json: bool) -> None:
    paths = resolved.spec.paths
    summary: dict[str, Any] = {"run_dir": str(paths.run_dir), "plan_hash": resolved.metadata.plan_hash}
    if records:
        first, last = records[0], records[-1]
        summary |= {"metrics": str(paths.metrics), "first": _ends(first), "last": _ends(last)}
        note(
            f"done: steps {first['step'] + 1} to {last['step'] + 1}, loss {_loss(first)} -> {_loss(last)}; "
            f"metrics in {paths.metrics}"
        )
    if json:
        print_json(summary)


def _ends(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("step", "loss", "seconds", "predicted_seconds", "idle_fraction")}


def _loss(record: dict[str, Any]) -> str:
    return "nan" if record["loss"] is None else f"{record['loss']:.4f}"
