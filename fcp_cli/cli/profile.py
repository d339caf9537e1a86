"""`fcp profile`: measure or compute the coefficients of the cost model; show and refit profiles."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from fcp_cli.cli.command import App, takes
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.profiling.options import ProfileRequest
from fcp_cli.util.console import Assumptions, human, note, print_json, print_result, progress, results
from fcp_cli.util.files import as_word, refuse_to_overwrite, write_text_atomically
from fcp_cli.util.options import Arg, Opt
from fcp_cli.util.words import counted, one_line

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile
    from fcp_cli.profiling.refit import Refit
    from fcp_cli.profiling.samples import Measurement, SamplesFile

profile_app = App()

_DEGREES: Final = (1, 2, 4, 8)  # shown when a profile is made or explained
_OUTPUT: Final = Path("profile.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(ProfileRequest):
    """The options of `fcp profile`."""

    output: Annotated[
        Path,
        Opt(
            "The profile to write; - is stdout.", flags=("--output", "-o"), trust="writes", common=True, group="Output"
        ),
    ] = _OUTPUT
    json: Annotated[bool, Opt("Print the result as one JSON document.", common=True)] = False


@profile_app.callback(invoke_without_command=True)
@takes(
    "fcp profile --model qwen3-tiny --budget-minutes 2",
    "fcp profile --analytic --model qwen3-8b --cluster h100-8x8 -o profile.yaml",
)
def profile(options: ProfileOptions) -> None:
    """Measure the cost of micro-batches on this machine, for fcp plan.

    Without a subcommand it measures this machine, within a minute on a CPU; an interrupted measurement continues where
    it stopped. With --analytic it computes the coefficients from the figures of a model and a cluster, and lists its
    assumptions.
    """
    from fcp_cli.profiling.choices import choose_measurement, computed_profile

    output, assumptions = options.output, Assumptions()
    _refuse_two_documents(output, options.json)
    if options.from_samples is not None:
        from fcp_cli.profiling.fits import profile_from_samples
        from fcp_cli.profiling.samples import read_samples

        samples = read_samples(options.from_samples)
        found, failure = profile_from_samples(samples, request=options.recipe), None
    elif options.analytic:
        found, failure = computed_profile(options, assumptions), None
    else:
        path = (_OUTPUT if str(output) == "-" else output).with_suffix(".samples.jsonl")
        measurement = choose_measurement(options, path, assumptions)
        if options.nodes > 1:
            _print_cluster_command(measurement, output)
            return
        found, failure = _measured(measurement, options, assumptions)
    _finish(found, output, options.json, assumptions)
    if failure is not None:
        raise ProfileError(failure)


@profile_app.command()
@takes("fcp profile show", "fcp profile show profile.yaml --lengths 4096,65536 --degrees 1,8")
def show(
    *,
    path: Annotated[Path, Arg("Cost profile, or a model with an example of one.", metavar="PROFILE")] = _OUTPUT,
    lengths: Annotated[
        tuple[int, ...], Opt("Lengths to show times for, e.g. 4096,65536.", commas=True, unset="around the break-even")
    ] = (),
    degrees: Annotated[tuple[int, ...], Opt("Degrees to show times for.", commas=True)] = _DEGREES,
    json: Annotated[bool, Opt("Print the result as one JSON document on stdout.")] = False,
) -> None:
    """Explain a profile: each coefficient, the length at which attention overtakes linear work, example times."""
    from fcp_cli.report.profiles import print_profile

    loaded = _named(path)
    if json:
        print_json(_explained(loaded, list(lengths), list(degrees)))
    else:
        print_profile(results(), loaded, lengths=list(lengths), degrees=list(degrees))


def _named(path: Path) -> CostProfile:
    """Return the profile in a file, or the shipped example profile for a model of that name."""
    from fcp_cli.cost.profile import load_cost_profile
    from fcp_cli.models.cluster import EXAMPLE_CLUSTER, shipped_profile_path

    if not path.exists() and not path.suffix.startswith(".y"):
        with suppress(ProfileError):  # unknown model: loading then fails with the file's name
            path = shipped_profile_path(str(path).removesuffix(f"-{EXAMPLE_CLUSTER}"))
            note(f"no such file; this is the example {path.name}")
    return load_cost_profile(path)


@profile_app.command()
@takes(
    "fcp profile fit runs/qwen3-8b-001",
    "fcp profile fit runs/qwen3-001 runs/qwen3-002 --skip-steps 5 -o refitted.yaml",
)
def fit(
    *,
    metrics: Annotated[tuple[Path, ...], Arg("Folders of runs, or their metrics.jsonl.", metavar="RUN_DIR")],
    output: Annotated[
        Path, Opt("The profile to write; - is stdout.", flags=("--output", "-o"), trust="writes")
    ] = _OUTPUT,
    profile: Annotated[Path | None, Opt("Profile to compare with and to start from.", unset="the plan's own")] = None,
    plan: Annotated[Path | None, Opt("The plan of the runs, if it was moved.")] = None,
    skip_steps: Annotated[int, Opt("Steps to skip after each start.", min=0)] = 1,
    json: Annotated[bool, Opt("Print the result as one JSON document on stdout.")] = False,
) -> None:
    """Refit a profile from the metrics of real training runs; every micro-batch is a sample."""
    from fcp_cli.cost.profile import load_cost_profile
    from fcp_cli.profiling.refit import refit, samples_of_run
    from fcp_cli.runs.metrics_reader import metrics_path

    _refuse_two_documents(output, json)
    before = load_cost_profile(profile) if profile is not None else None
    files = [metrics_path(path) for path in metrics]
    runs = [samples_of_run(path, plan=plan, skip_steps=skip_steps) for path in files]
    refuse_to_overwrite(output, *files, plan)  # the profile may be replaced, since it is refitted
    result = refit(runs, before=before)
    (note if json or str(output) == "-" else print_result)(
        f"{counted(result.num_fitted, 'micro-batch')} fitted, {result.num_held_out} held out; held-out error "
        f"before {result.held_out_before_percent:.1f} %, after {result.held_out_after_percent:.1f} %"
    )
    if result.held_out_after_percent > result.held_out_before_percent:
        note("warning: the refit predicts held-out micro-batches worse than the profile before; train more steps")
    if result.kept:
        note(f"unchanged, because no micro-batch exercises them: {', '.join(result.kept)}")
    if any(run.hides_encoder for run in runs):
        note("warning: the plan has no vision-encoder work, so the encoder's time is inside the fitted figures")
    _write(result.profile, output)
    if json:
        print_json(_refit_document(result, output))


def _refit_document(result: Refit, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "micro_batches_fitted": result.num_fitted,
        "micro_batches_held_out": result.num_held_out,
        "fitted_error_percent": {"before": result.fitted_before_percent, "after": result.fitted_after_percent},
        "held_out_error_percent": {"before": result.held_out_before_percent, "after": result.held_out_after_percent},
        "kept": list(result.kept),
    }


def _measured(
    measurement: Measurement, options: ProfileOptions, assumptions: Assumptions
) -> tuple[CostProfile, str | None]:
    """Measure; return the fitted profile, and the reason if the measurement ended early, else None."""
    from fcp_cli.profiling.fits import profile_from_samples
    from fcp_cli.profiling.samples import prepare_samples

    assumptions.report()
    assumptions.assumed.clear()
    if prepare_samples(measurement):
        note(f"continuing the measurement in {measurement.samples}; remove it to start over")
    try:
        samples, failure = _run_with_bar(measurement)
    except KeyboardInterrupt:
        note(f"the measurements so far are in {measurement.samples}; the same command continues from there")
        raise
    try:
        found = profile_from_samples(samples, request=options.recipe)
    except ProfileError as error:
        raise ProfileError(failure or str(error)) from error
    return found, failure


def _run_with_bar(measurement: Measurement) -> tuple[SamplesFile, str | None]:
    from fcp_cli.profiling.measure import run_measurement

    seconds = int(measurement.budget_seconds)
    with progress() as bar:
        task = bar.add_task(f"measuring {Path(measurement.model).name}", total=seconds)

        def show_progress(elapsed: float, observations: int) -> None:
            bar.update(
                task, completed=min(int(elapsed), seconds), description=f"measuring ({observations} observations)"
            )

        return run_measurement(measurement, environment=job_environment(measurement), on_progress=show_progress)


def job_environment(measurement: Measurement) -> dict[str, str]:
    """Return the environment variables of a job with this model, ranks and nodes, so that measurements match it."""
    from fcp_cli.launching.environment import set_by_fcp, variables_like_a_job
    from fcp_cli.util.machine import UNKNOWN_MACHINE, find_machine

    # On other nodes, only the device kind is known.
    here = find_machine(measurement.device) if measurement.nodes == 1 else UNKNOWN_MACHINE
    variables = variables_like_a_job(
        replace(here, device=measurement.device),
        os.environ,
        model=measurement.model,
        sync=measurement.sync,
        ranks=measurement.ranks,
        nodes=measurement.nodes,
        tokens_per_rank=measurement.max_length // max(measurement.degrees),
        cluster=measurement.cluster,
    )
    return set_by_fcp(variables)


def _print_cluster_command(measurement: Measurement, output: Path) -> None:
    from fcp_cli.profiling.measure import cluster_command
    from fcp_cli.profiling.samples import prepare_samples

    request, samples = output.with_suffix(".request.json"), measurement.samples
    prepare_samples(measurement)
    measurement.write(request)
    note(f"wrote {request} and {samples}; run this on each of {measurement.nodes} nodes, NODE_RANK 0 being")
    note(f"MASTER_ADDR, with this folder on shared storage; then: fcp profile --from-samples {as_word(samples)}")
    command = cluster_command(measurement, request, master="MASTER_ADDR", environment=job_environment(measurement))
    sys.stdout.write(command + "\n")


def _finish(found: CostProfile, output: Path, json: bool, assumptions: Assumptions) -> None:
    """Report assumptions and results, write the profile, and print it if --json is set."""
    from fcp_cli.report.profiles import print_errors, reading

    assumptions.report()
    for warning in found.measurement.get("warnings") or ():
        note(f"warning: {warning}")
    console = human() if json or str(output) == "-" else results()
    for line in reading(found, list(_DEGREES)):
        console.print(one_line(line), markup=False, soft_wrap=True)
    print_errors(console, found)
    _write(found, output)
    if json:
        from fcp_cli.cost.profile import dump_cost_profile
        from fcp_cli.util.inputs import parse_yaml

        document = parse_yaml(dump_cost_profile(found), name="the profile", error=ProfileError)
        print_json({"output": str(output), "profile": document})


def _refuse_two_documents(output: Path, json: bool) -> None:
    if json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout; write the profile to a file")


def _write(found: CostProfile, output: Path) -> None:
    from fcp_cli.cost.profile import dump_cost_profile
    from fcp_cli.models.model import known_model
    from fcp_cli.util.files import manifest_here

    text = dump_cost_profile(found)
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_text_atomically(output, text)
    how = "" if output == _OUTPUT else f" --profile {as_word(output)}"
    if found.origin == "analytic" and known_model(found.model) is not None:  # its recipe was chosen without lengths
        how = f" --model {as_word(found.model)} --cluster {as_word(found.cluster)}"
    plan = f"fcp plan {as_word(manifest_here() or 'MANIFEST')}{how}"
    note(f"wrote {output} ({found.origin}), which 'fcp profile show {as_word(output)}' explains; next: {plan}")


def _explained(loaded: CostProfile, lengths: list[int], degrees: list[int]) -> dict[str, Any]:
    from fcp_cli.cost.explain import break_even_tokens, example_lengths, figures_of, host_bound_tokens, seconds_table

    lengths = lengths or example_lengths(loaded)
    return {
        "model": loaded.model,
        "cluster": loaded.cluster,
        "origin": loaded.origin,
        "figures": {
            path: {"value": value, "meaning": meaning} for path, (value, meaning) in figures_of(loaded).items()
        },
        "break_even_tokens": break_even_tokens(loaded),
        "host_bound_tokens": host_bound_tokens(loaded),
        "tokens_per_rank": loaded.memory.tokens_per_rank(),
        "degrees": degrees,
        "seconds": {
            str(n): row for n, row in zip(lengths, seconds_table(loaded, lengths, degrees).tolist(), strict=True)
        },
    }
