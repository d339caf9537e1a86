"""Memory estimates against measured peaks on this machine's CPU, up to a length near the token budget.

    fcp profile -o profile.yaml
    python -m benchmarks.memory profile.yaml --capacity-gb 2

Every row is a process of its own that trains one step on a pack (forward, backward, AdamW, and again), alone on a rank.

- profile: weights, gradients, optimizer and activations as the profile's memory block says, against the peak resident
  size of the process beyond what it held before it built the model. The C library keeps pages that PyTorch has freed.
- analytic: what `fcp profile --analytic` computes from the model's figures, against the peak of what PyTorch had
  allocated, which is what accelerators report as their peak.

With `--capacity-gb` a rank has only so much memory, so that its budget is reached in seconds; without it the profile's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcp_cli.cost.profile import CostProfile, Memory, load_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model

RECIPE = Recipe(precision="fp32")
SHARES_OF_BUDGET = (0.1, 0.25, 0.5, 0.95)
SEQUENCE_TOKENS = 512  # attention of short sequences costs little time, and no memory of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """What one process measured, in bytes beyond what it held before the model."""

    resident: float
    allocated: float


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="a measured cost profile")
    parser.add_argument("--capacity-gb", type=float, help="memory that a rank may use, in 1e9 bytes")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        model, tokens = options.measure
        print(json.dumps(measure(model, int(tokens))))
        return
    profile = load_cost_profile(options.profile)
    capacity = 1e9 * options.capacity_gb if options.capacity_gb else profile.memory.capacity_bytes
    print_table(profile, replace(profile.memory, capacity_bytes=capacity), options.profile)


def print_table(profile: CostProfile, memory: Memory, path: Path) -> None:
    """Measure and print size by size."""
    budget = memory.tokens_per_rank()
    if budget is None or budget < SEQUENCE_TOKENS / SHARES_OF_BUDGET[0]:
        sys.exit(f"{path} gives a budget of {budget} tokens; measure the memory first, or raise --capacity-gb")
    analytic = rank_memory(load_model(profile.model), RECIPE, sync="iteration", ranks=1, on_cpu=True).as_profile_memory(
        memory.capacity_bytes
    )
    print(f"{profile.model} on a CPU rank of {memory.capacity_bytes / 1e9:g} GB: {budget:,} tokens\n")
    print("| tokens | of budget | profile | resident | error | analytic | allocated | error |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for share in SHARES_OF_BUDGET:
        tokens = round(share * budget / SEQUENCE_TOKENS) * SEQUENCE_TOKENS
        peak = measured_apart(profile.model, tokens, path)
        cells = [f"{tokens:,}", f"{tokens / budget:.0%}"]
        for estimate, seen in ((memory, peak.resident), (analytic, peak.allocated)):
            said = estimate.model_state_bytes + estimate.bytes_per_token * tokens
            cells += [f"{said / 1e6:,.0f} MB", f"{seen / 1e6:,.0f} MB", f"{said / seen - 1:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def measured_apart(model: str, tokens: int, path: Path) -> Peak:
    """Measure in a process of its own: the C library never forgets a former peak."""
    command = [sys.executable, "-m", "benchmarks.memory", str(path), "--measure", model, str(tokens)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Peak(**found)


def measure(model: str, tokens: int) -> dict[str, float]:
    """Peaks of two training steps on one pack: resident without a profiler, then allocated with one."""
    import torch

    from fcp_cli.profiling.timing import peak_bytes, reset_peak
    from fcp_cli.profiling.workload import SilentTransport, Workload, build_model, state_bytes

    torch.set_num_threads(1)
    device = torch.device("cpu")
    spec = load_model(model)
    # The libraries' own buffers, which the first call makes, are no part of any estimate.
    Workload(build_model(spec, 1, device, RECIPE), device, RECIPE, SilentTransport()).microbatch((64,), (0,), 0)()
    reset_peak(device)
    before = peak_bytes(device) or 0.0
    workload = Workload(build_model(spec, spec.num_layers, device, RECIPE), device, RECIPE, SilentTransport())
    optimizer = torch.optim.AdamW(workload.model.parameters())
    run = workload.microbatch((SEQUENCE_TOKENS,) * (tokens // SEQUENCE_TOKENS), (0,), 0)

    def step() -> None:
        run()
        optimizer.step()

    step()
    step()
    after = peak_bytes(device) or 0.0
    return {"resident": after - before, "allocated": state_bytes(optimizer) + allocated_peak(run)}


def allocated_peak(run: Callable[[], object]) -> float:
    """Most bytes that PyTorch's allocator held at once beyond what it held before `run`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0.0
    for _, num_bytes in changes:
        held += num_bytes
        most = max(most, held)
    return most


if __name__ == "__main__":
    main()
