"""How much is timed: a model, the longest pack and the minutes, by device and by `--quick`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from fcp_cli.machine.devices import find_machine
from fcp_cli.profiling.options import ProfileRequest
from fcp_cli.selftest.options import SelftestRequest

_MOST_CPU_RANKS = 4


def profile_request(request: SelftestRequest, samples: Path) -> ProfileRequest:
    """Return the packs to time, as a request of `fcp profile`."""
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
