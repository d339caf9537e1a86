"""The options of `fcp selftest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fcp_cli.options import MOST_RANKS, MOST_WAIT, Opt

OUTPUT = Path("selftest.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class SelftestRequest:
    """Where to test, and how long."""

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
    output: Annotated[Path, Opt("File for the whole report.", flags=("--output", "-o"), trust="writes")] = OUTPUT
    json: Annotated[bool, Opt("Print the report as one JSON document on stdout.")] = False
