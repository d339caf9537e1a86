"""Command-line options of `fcp selftest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from fcp_cli.util.options import MOST_RANKS, MOST_WAIT, Opt

if TYPE_CHECKING:
    from fcp_cli.profiling.options import ProfileRequest

OUTPUT = Path("selftest.json")
_MOST_CPU_RANKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SelftestRequest:
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
    output: Annotated[Path, Opt("File for the full report.", flags=("--output", "-o"), trust="writes")] = OUTPUT
    json: Annotated[bool, Opt("Print the report as one JSON document on stdout.")] = False


def profile_request(request: SelftestRequest, samples: Path) -> ProfileRequest:
    """Return the profiling request for timing packs, by device and `--quick`."""
    from fcp_cli.profiling.options import ProfileRequest
    from fcp_cli.util.machine import find_machine

    ranks, device = request.ranks, request.device
    if request.nodes == 1:
        machine = find_machine(request.device)
        device = cast(Literal["cpu", "cuda", "npu"], machine.device)
        ranks = ranks or (min(_MOST_CPU_RANKS, machine.num_cores) if device == "cpu" else machine.num_devices)
    on_cpu = device == "cpu"
    minutes, longest = (0.5, 2048) if on_cpu else (1.5, 32_768)
    if request.quick:
        minutes, longest = (0.05, 512) if on_cpu else (0.25, 8192)
    return ProfileRequest(
        model=request.model or ("qwen3-tiny" if on_cpu else "qwen3-8b"),
        budget_minutes=minutes,
        max_length=longest,
        degrees=() if on_cpu else tuple(degree for degree in (1, 2, 4, 8) if ranks is None or degree <= max(ranks, 1)),
        ranks=ranks,
        device=device,
        samples=samples,
        nodes=request.nodes,
        devices_per_node=request.devices_per_node,
    )
