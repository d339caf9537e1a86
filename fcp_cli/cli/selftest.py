"""`fcp selftest`: prove on this node that kernels, rings, order and predictions are right; one block for an issue."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import typer

from fcp_cli.cli.command import takes
from fcp_cli.errors import UsageError
from fcp_cli.util.console import Assumptions, note, print_json, results
from fcp_cli.util.options import MOST_RANKS, MOST_WAIT, Opt

if TYPE_CHECKING:
    from fcp_cli.profiling.options import ProfileRequest
    from fcp_cli.profiling.samples import Measurement
    from fcp_cli.verification.selftest import SelftestReport, Settings

_MOST_CPU_RANKS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SelftestOptions:
    """Options of `fcp selftest`."""

    device: Annotated[Literal["auto", "cpu", "cuda", "npu"], Opt("Device to test.")] = "auto"
    ranks: Annotated[
        int | None, Opt("Processes to test with.", min=1, max=MOST_RANKS, unset="one per device, or per core up to 4")
    ] = None
    nodes: Annotated[int, Opt("Number of nodes; with several, print the command for each.", min=1, max=MOST_RANKS)] = 1
    devices_per_node: Annotated[int, Opt("Devices of each of several nodes.", min=1, max=MOST_RANKS)] = 8
    quick: Annotated[bool, Opt("Small sizes: seconds on a CPU, a minute on accelerators.")] = False
    model: Annotated[
        str | None,
        Opt("Shipped model whose packs are timed.", metavar="NAME", unset="qwen3-tiny on a CPU, else qwen3-8b"),
    ] = None
    limit: Annotated[float, Opt("Seconds that a check may take before it counts as a hang.", min=1, max=MOST_WAIT)] = (
        180.0
    )
    output: Annotated[Path, Opt("File for the full report.", flags=("--output", "-o"), trust="writes")] = Path(
        "selftest.json"
    )
    json: Annotated[bool, Opt("Print the report as one JSON document on stdout.")] = False


@takes("fcp selftest", "fcp selftest --quick --ranks 2 --json")
def selftest(options: SelftestOptions) -> None:
    """Test this node in a job's environment; print a block for an issue.

    Checks versions and topology, the attention kernel against fp64, rings of every degree against one device, orders
    that could hang, messages, overlap, and held-out packs against their prediction. Five minutes on 8 GPUs, two on a
    CPU. Exit status 1 if a check failed or hung; a hang is named and ended.
    """
    from tempfile import TemporaryDirectory

    from fcp_cli.util.processes import torchrun_argv
    from fcp_cli.verification.selftest import WORKER, watch

    if options.nodes > 1:
        _print_commands(options)
        return
    with TemporaryDirectory(prefix="fcp-selftest-") as folder:
        measurement = _prepare(options, Path(folder))
        settings = _settings(options, measurement, Path(folder))
        report = watch(
            settings,
            [*torchrun_argv(measurement.ranks), *WORKER, str(settings.write())],
            environment=_environment(measurement),
            limit_seconds=options.limit,
            on_progress=note,
        )
    _finish(report, options)


def _prepare(options: SelftestOptions, folder: Path) -> Measurement:
    """Choose the packs to time, and write the measurement request and the header of the samples file."""
    from fcp_cli.profiling.choices import choose_measurement
    from fcp_cli.profiling.samples import begin_samples

    measurement = choose_measurement(_profile_request(options), folder / "packs.samples.jsonl", Assumptions())
    if measurement.device != "cpu":  # fewer than for a profile, so that it takes minutes
        measurement = replace(measurement, degrees=tuple(n for n in (1, 2, 4, 8) if n <= measurement.ranks))
    folder.mkdir(parents=True, exist_ok=True)  # only after validation, so that an invalid request leaves no folder
    begin_samples(measurement)
    measurement.write(folder / "measurement.json")
    return measurement


def _profile_request(request: SelftestOptions) -> ProfileRequest:
    """Return the profiling request for timing packs, by device and `--quick`."""
    from fcp_cli.profiling.options import ProfileRequest
    from fcp_cli.util.machine import find_machine

    device, ranks = request.device, request.nodes * request.devices_per_node
    if request.nodes == 1:
        machine = find_machine(request.device)
        device = cast(Literal["cpu", "cuda", "npu"], machine.device)
        units = min(_MOST_CPU_RANKS, machine.num_cores) if device == "cpu" else machine.num_devices
        ranks = request.ranks or units
    elif request.ranks not in (None, ranks):
        raise UsageError(
            f"--ranks {request.ranks}: {request.nodes} nodes of --devices-per-node {request.devices_per_node} have "
            f"{ranks} ranks; remove --ranks, or give the devices of a node"
        )
    on_cpu = device == "cpu"
    minutes, longest = (0.5, 2048) if on_cpu else (1.5, 32_768)
    if request.quick:
        minutes, longest = (0.05, 512) if on_cpu else (0.25, 8192)
    return ProfileRequest(
        model=request.model or ("qwen3-tiny" if on_cpu else "qwen3-8b"),
        budget_minutes=minutes,
        max_length=longest,
        ranks=ranks,
        device=device,
        nodes=request.nodes,
    )


def _settings(options: SelftestOptions, measurement: Measurement, folder: Path) -> Settings:
    from fcp_cli.verification.selftest import Settings

    return Settings(folder=folder, device=measurement.device, quick=options.quick, writes_report=options.nodes > 1)


def _environment(measurement: Measurement) -> dict[str, str]:
    from fcp_cli.cli.profile import job_environment

    # One thread per rank, as in CPU profiles.
    threads = {"OMP_NUM_THREADS": "1"} if measurement.device == "cpu" else {}
    return {**job_environment(measurement), **threads}


def _print_commands(options: SelftestOptions) -> None:
    """Print the command to run on each node; rank 0 then prints the block for an issue."""
    from fcp_cli.util.processes import meeting_options, torchrun_argv
    from fcp_cli.verification.selftest import WORKER

    folder = options.output.with_suffix("").absolute()
    measurement = _prepare(options, folder)
    settings = _settings(options, measurement, folder).write()
    meeting = meeting_options(options.nodes, address="MASTER_ADDR", port=29500, job=str(folder))
    argv = torchrun_argv(options.devices_per_node, options=meeting)
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in _environment(measurement).items())
    note(f"wrote {folder}; run this on each of {options.nodes} nodes, NODE_RANK 0 being MASTER_ADDR, with that folder")
    note(f"on shared storage; rank 0 then writes {folder}/report.json and prints the block")
    program = shlex.join([*WORKER, str(settings)])
    sys.stdout.write(f'{variables}{shlex.join(argv)} --rdzv-conf=rank="$NODE_RANK" {program}\n')


def _finish(report: SelftestReport, options: SelftestOptions) -> None:
    """Write the JSON report, print the block or (--json) the report, and exit with 1 if a check failed."""
    from fcp_cli.util.files import write_json_atomically

    document = report.document()
    write_json_atomically(options.output, document)
    if options.json:
        print_json(document)
    else:
        results().print(report.block(), markup=False, soft_wrap=True)
    note(f"wrote {options.output}; paste the block above into an issue, and attach the file")
    if report.failed:
        raise typer.Exit(1)
