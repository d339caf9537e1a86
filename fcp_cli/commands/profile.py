"""`fcp profile`: measure or compute the coefficients of the cost model; show, refit and compare profiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcp_cli.command_line import App
from fcp_cli.console import Origins, human, note, print_json, progress
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.files import refuse_to_overwrite
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile
    from fcp_cli.profiling.measure import MeasureSettings
    from fcp_cli.profiling.samples import SamplesFile

profile_app = App(help="Measure what micro-batches cost here, or compute it; show, refit and compare profiles.")

_ANALYTIC = "Without measuring"
_DEGREES = "1,2,4,8"  # that a profile is explained at, when it is made and when it is shown
_WHERE = "Where and how long"
_Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]


@profile_app.callback(invoke_without_command=True)
def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Shipped model, or its YAML (qwen3-tiny on a CPU, else qwen3-8b)."),
    ] = None,
    hf_config: Annotated[
        Path | None, typer.Option(help="config.json of a Hugging Face model, instead of --model.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Shipped cluster or its YAML (this-machine; with --analytic example-8x8).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write; - is stdout.")] = Path(
        "profile.yaml"
    ),
    budget_minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Minutes to measure (1 for small models on a CPU, else 10).", rich_help_panel=_WHERE
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest pack (4096 on a CPU, else 131072).", rich_help_panel=_WHERE),
    ] = None,
    degrees: Annotated[
        str | None, typer.Option(help="Degrees to measure, as 1,2,4 (up to 8).", rich_help_panel=_WHERE)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes to measure with (one per device or core; 1 emulates); with --analytic, ranks of the job.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu.", rich_help_panel=_WHERE)] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16 (auto: bfloat16 on accelerators).", rich_help_panel=_WHERE)
    ] = "auto",
    layers: Annotated[
        str | None,
        typer.Option(help="Layer counts to measure and extrapolate from, as 2,6 (all).", rich_help_panel=_WHERE),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(help="File that keeps samples (OUTPUT.samples.jsonl).", rich_help_panel=_WHERE),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on with an interrupted run.", rich_help_panel=_WHERE)
    ] = False,
    from_samples: Annotated[
        Path | None, typer.Option(help="Fit these samples; measure nothing.", rich_help_panel=_WHERE)
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="With several, print what to run on each node.", rich_help_panel=_WHERE),
    ] = 1,
    devices_per_node: Annotated[
        int, typer.Option(min=1, help="Devices of each of several nodes.", rich_help_panel=_WHERE)
    ] = 8,
    analytic: Annotated[
        bool,
        typer.Option("--analytic", help="Compute from the figures of model and cluster.", rich_help_panel=_ANALYTIC),
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Devices that share each layer.", rich_help_panel=_ANALYTIC)
    ] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=_ANALYTIC)] = 1,
    zero: Annotated[
        int | None,
        typer.Option(
            min=0, max=3, help="ZeRO stage (the least that leaves half of the memory).", rich_help_panel=_ANALYTIC
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute activations in backward.", rich_help_panel=_ANALYTIC)
    ] = False,
    freeze_vision: Annotated[
        bool,
        typer.Option("--freeze-vision", help="For jobs that train only the language model of a vision model."),
    ] = False,
    precision: Annotated[
        str, typer.Option(help="bf16 (fp32 master weights), amp (autocast) or fp32.", rich_help_panel=_ANALYTIC)
    ] = "bf16",
    json: _Json = False,
) -> None:
    """Measure what micro-batches cost on this machine and write a cost profile for fcp plan.

    Alone it measures here, within a minute on a CPU; an interrupted run goes on where it stopped. With --analytic it
    computes the coefficients from the figures of a model and a cluster, and says what it assumes.
    """
    if context.invoked_subcommand is not None:
        return
    if model is not None and hf_config is not None:
        raise UsageError("--model and --hf-config exclude each other; give one")
    _refuse_two_documents(output, json)
    name = str(hf_config) if hf_config is not None else model
    origins = Origins()
    if from_samples is not None:
        _finish(_fitted(from_samples, freeze_vision), output, json, origins)
        return
    from fcp_cli.profiling.choices import JobChoice, MeasureChoice, choose_measurement, computed_profile

    if analytic:
        job = JobChoice(
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            zero_stage=zero,
            recompute=recompute,
            precision=precision,
            freeze_vision=freeze_vision,
        )
        _finish(computed_profile(name, cluster, job, origins), output, json, origins)
        return
    choice = MeasureChoice(
        model=name,
        cluster=cluster,
        ranks=ranks,
        nodes=nodes,
        devices_per_node=devices_per_node,
        degrees=tuple(_integers(degrees or "", "--degrees")),
        max_length=max_length,
        device=device,
        dtype=dtype,
        layers=tuple(_integers(layers or "", "--layers")),
        budget_minutes=budget_minutes,
        samples=samples or _samples_beside(output),
        freeze_vision=freeze_vision,
    )
    settings = choose_measurement(choice, origins)
    if nodes > 1:
        _print_cluster_command(settings, output, fresh)
    else:
        _finish(_measured(settings, fresh, origins, freeze_vision), output, json, origins)


@profile_app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="[PROFILE]", help="Cost profile.")] = Path("profile.yaml"),
    lengths: Annotated[
        str, typer.Option(help="Lengths to give times for, as 4096,65536 (around the break-even).")
    ] = "",
    degrees: Annotated[str, typer.Option(help="Degrees to give times for.")] = _DEGREES,
    json: _Json = False,
) -> None:
    """Explain a profile: each coefficient, where attention overtakes linear work, times of example lengths."""
    from fcp_cli.cost.profile import load_cost_profile
    from fcp_cli.report.profiles import print_profile

    loaded = load_cost_profile(path)
    chosen, wanted = _integers(degrees, "--degrees"), _integers(lengths, "--lengths")
    if json:
        print_json(_explained(loaded, wanted, chosen))
    else:
        print_profile(human(), loaded, lengths=wanted, degrees=chosen)


@profile_app.command()
def fit(
    metrics: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, or their metrics.jsonl.")
    ],
    plan: Annotated[Path | None, typer.Option(help="The runs' plan, if it lies elsewhere now.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Profile to compare with and to start from (the plan's own).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write; - is stdout.")] = Path(
        "profile.yaml"
    ),
    skip_steps: Annotated[int, typer.Option(min=0, help="Steps after each start to leave out.")] = 1,
    json: _Json = False,
) -> None:
    """Refit a profile from the metrics of real training runs, where every micro-batch is a sample."""
    from fcp_cli.cost.profile import load_cost_profile
    from fcp_cli.profiling.refit import refit, samples_of_run
    from fcp_cli.runs.metrics_reader import metrics_path

    _refuse_two_documents(output, json)
    before = load_cost_profile(profile) if profile is not None else None
    metrics = [metrics_path(path) for path in metrics]
    runs = [samples_of_run(path, plan=plan, skip_steps=skip_steps) for path in metrics]
    refuse_to_overwrite(output, *metrics, plan)  # the profile may be replaced: it is what is refitted
    result = refit(runs, before=before)
    note(
        f"{counted(result.num_fitted, 'micro-batch')} fitted, {result.num_held_out} held out; held-out error "
        f"before {result.held_out_before_percent:.1f} %, after {result.held_out_after_percent:.1f} %"
    )
    if result.held_out_after_percent > result.held_out_before_percent:
        note("warning: the refit predicts held-out micro-batches worse than the profile before; train more steps")
    if result.kept:
        note(f"kept as they were, since no micro-batch tells them: {', '.join(result.kept)}")
    if any(run.hides_encoder for run in runs):
        note("warning: the plan counted no work of the vision encoder: what images took is inside the fitted figures")
    _write(result.profile, output)
    if json:
        print_json(
            {
                "output": str(output),
                "micro_batches_fitted": result.num_fitted,
                "micro_batches_held_out": result.num_held_out,
                "fitted_error_percent": {"before": result.fitted_before_percent, "after": result.fitted_after_percent},
                "held_out_error_percent": {
                    "before": result.held_out_before_percent,
                    "after": result.held_out_after_percent,
                },
                "kept": list(result.kept),
            }
        )


@profile_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A cost profile.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    json: _Json = False,
) -> None:
    """Two profiles side by side, figure by figure."""
    from fcp_cli.cost.explain import differences
    from fcp_cli.cost.profile import load_cost_profile
    from fcp_cli.report.profiles import print_differences

    a, b = load_cost_profile(first), load_cost_profile(second)
    rows = differences(a, b)
    if json:
        figures = {row.path: {"first": row.first, "second": row.second, "ratio": row.ratio} for row in rows}
        print_json({"first": str(first), "second": str(second), "figures": figures})
    else:
        print_differences(human(), a, b, rows)


def _measured(settings: MeasureSettings, fresh: bool, origins: Origins, freeze_vision: bool) -> CostProfile:
    from fcp_cli.profiling.assemble import profile_from_samples
    from fcp_cli.profiling.measure import prepare_samples

    origins.report()
    origins.assumed.clear()
    if prepare_samples(settings, fresh=fresh):
        note(f"going on with the measurement in {settings.samples}; --fresh begins anew")
    try:
        return profile_from_samples(_run_with_bar(settings), freeze_vision=freeze_vision)
    except KeyboardInterrupt:
        note(f"what was measured is kept in {settings.samples}; the same command goes on from there")
        raise


def _run_with_bar(settings: MeasureSettings) -> SamplesFile:
    from fcp_cli.profiling.measure import run_measurement

    with progress() as bar:
        task = bar.add_task(f"measuring {Path(settings.model).name}", total=int(settings.budget_seconds))

        def show_progress(elapsed: float, observations: int) -> None:
            bar.update(
                task, completed=int(min(elapsed, settings.budget_seconds)), description=f"{observations} observations"
            )

        return run_measurement(settings, on_progress=show_progress)


def _print_cluster_command(settings: MeasureSettings, output: Path, fresh: bool) -> None:
    from fcp_cli.profiling.measure import cluster_command, prepare_samples, worker_request

    request = output.with_suffix(".request.json")
    prepare_samples(settings, fresh=fresh)
    worker_request(settings).write(request)
    note(f"wrote {request} and {settings.samples}; run this on each of {settings.nodes} nodes, NODE_RANK 0 being")
    note("MASTER_ADDR, with this folder on shared storage; then: fcp profile --from-samples " + str(settings.samples))
    sys.stdout.write(cluster_command(settings, request, master="MASTER_ADDR") + "\n")


def _fitted(path: Path, freeze_vision: bool) -> CostProfile:
    from fcp_cli.profiling.assemble import profile_from_samples
    from fcp_cli.profiling.samples import read_samples

    return profile_from_samples(read_samples(path), freeze_vision=freeze_vision)


def _finish(found: CostProfile, output: Path, json: bool, origins: Origins) -> None:
    """Say what was assumed and found, write the profile, and print it as JSON if asked to."""
    from fcp_cli.report.profiles import print_errors, reading

    origins.report()
    _require_room(found)
    console = human()
    for line in reading(found, _integers(_DEGREES, "--degrees")):
        note(line)
    print_errors(console, found)
    _write(found, output)
    if json:
        print_json({"output": str(output), "profile": _document(found)})


def _require_room(found: CostProfile) -> None:
    budget = found.memory.tokens_per_rank()
    if budget is not None and budget < 1:
        memory = found.memory
        raise ProfileError(
            f"{found.model} does not fit: its state takes {memory.model_state_bytes / 1e9:.1f} of the "
            f"{memory.capacity_bytes / 1e9:.1f} GB that a rank of {found.cluster} may use; raise --zero, "
            "--tensor-parallel or --pipeline-parallel"
        )


def _refuse_two_documents(output: Path, json: bool) -> None:
    if json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout; write the profile to a file")


def _write(found: CostProfile, output: Path) -> None:
    from fcp_cli.cost.profile import dump_cost_profile
    from fcp_cli.files import write_text_atomically

    text = dump_cost_profile(found)
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_text_atomically(output, text)
    plan = "fcp plan dataset.parquet" + ("" if output == Path("profile.yaml") else f" --profile {output}")
    note(f"wrote {output} ({found.origin}); next: fcp profile show {output}, or {plan}")


def _document(found: CostProfile) -> dict[str, Any]:
    import yaml

    from fcp_cli.cost.profile import dump_cost_profile

    document: dict[str, Any] = yaml.safe_load(dump_cost_profile(found))
    return document


def _explained(loaded: CostProfile, lengths: list[int], degrees: list[int]) -> dict[str, Any]:
    from fcp_cli.cost.explain import break_even_tokens, example_lengths, figures_of, seconds_table

    lengths = lengths or example_lengths(loaded)
    return {
        "model": loaded.model,
        "cluster": loaded.cluster,
        "origin": loaded.origin,
        "figures": {f.path: {"value": f.value, "meaning": f.meaning} for f in figures_of(loaded)},
        "break_even_tokens": break_even_tokens(loaded),
        "tokens_per_rank": loaded.memory.tokens_per_rank(),
        "degrees": degrees,
        "seconds": {
            str(n): row for n, row in zip(lengths, seconds_table(loaded, lengths, degrees).tolist(), strict=True)
        },
    }


def _integers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option} is {text!r}; give whole numbers with commas, as 1,2,4") from None
    if any(number < 1 for number in numbers):
        raise UsageError(f"{option} is {text!r}; every number must be at least 1")
    return sorted(set(numbers))


def _samples_beside(output: Path) -> Path:
    return Path("profile.samples.jsonl") if str(output) == "-" else output.with_suffix(".samples.jsonl")
