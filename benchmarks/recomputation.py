"""What a token takes and costs under each kind of recomputation: bytes held, and seconds computed again.

    python -m benchmarks.recomputation
    python -m benchmarks.recomputation --models llama3-70b --cluster a100-8x8

A row is one kind of one model under ZeRO-3 over all ranks, from computed figures: bytes that a token holds, tokens that
fit a rank, microseconds a token without attention, and bytes that each further microsecond frees, against the row
above. The last column is how long that row's bytes
take to the host and back.
"""

from __future__ import annotations

import argparse
from typing import get_args

from fcp_cli.cost.model import PCIE_BYTES_PER_SECOND
from fcp_cli.cost.recipe import Recipe, Recompute
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=("qwen3-8b", "llama3-70b", "qwen3-30b-a3b"))
    parser.add_argument("--cluster", default="h100-8x8")
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    print("| model | recompute | MB a token | tokens a rank | us a token | KB freed a us | us by PCIe instead |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for model in options.models:
        _print_frontier(model, options.cluster, options.ranks)


def _print_frontier(model: str, cluster: str, ranks: int) -> None:
    spec, machine = load_model(model), load_cluster(cluster)
    place = JobRanks(num_ranks=ranks, ranks_per_node=8, capacity_bytes=machine.memory_bytes * (1 - RESERVE_FRACTION))
    before: tuple[float, float] | None = None
    for kind in get_args(Recompute):
        if kind == "as-needed":  # between none and full, by the micro-batch: it has no figure of a token
            continue
        recipe = Recipe(zero_stage=3, recompute=kind)
        fit = place.fit(spec, recipe, "microbatch")
        profile = analytic_profile(spec, machine, recipe=recipe, sync="microbatch", ranks=ranks)
        seconds = profile.coefficients.linear_seconds_per_token
        freed, sent = "", ""
        if before is not None and seconds > before[1]:
            size = before[0] - fit.bytes_per_token
            freed = f"{size / (seconds - before[1]) / 1e9:.1f}"
            sent = f"{2 * size / PCIE_BYTES_PER_SECOND * 1e6:.1f}"
        print(
            f"| {model} | {kind} | {fit.bytes_per_token / 1e6:.2f} | {fit.tokens:,} | {seconds * 1e6:.1f} "
            f"| {freed} | {sent} |"
        )
        before = fit.bytes_per_token, seconds


if __name__ == "__main__":
    main()
