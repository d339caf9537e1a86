"""The recipe that a plan gets where none is asked for: every shipped model on shipped clusters.

    python -m benchmarks.default_recipes
    python -m benchmarks.default_recipes --ranks 64 --clusters h100-8x8

A row says what is kept and computed, how many tokens a rank may hold, and what the memory model counts for 16,384 and
at the whole budget, of a device's memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.memory.fitting import LEAST_TOKENS, JobRanks, fitting_recipe
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model, shipped_names

CLUSTERS = ("h100-8x8", "a100-8x8", "ascend910b-8x8", "h200-8x8")


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of the job, one device each")
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    options = parser.parse_args()
    print("| cluster | model | recipe | sync | tokens a rank | GB at 16,384 tokens | GB at the budget | of GB |")
    print("|---|---|---|---|---|---|---|---|")
    for cluster in options.clusters:
        for row in rows(cluster, options.ranks):
            print(f"| {' | '.join(row)} |")


def rows(cluster_name: str, ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one cluster."""
    cluster = load_cluster(cluster_name)
    place = JobRanks(
        num_ranks=ranks,
        ranks_per_node=min(ranks, cluster.devices_per_node),
        capacity_bytes=cluster.memory_bytes * (1 - RESERVE_FRACTION),
    )
    for name in shipped_names("model"):
        fit = fitting_recipe(load_model(name), RecipeRequest(), place)
        sizes = (f"{fit.memory.total_bytes(tokens) / 1e9:.1f}" for tokens in (LEAST_TOKENS, fit.tokens))
        budget = f"{fit.tokens:,}" if fit.is_enough else f"{fit.tokens:,} (fewer than wanted)"
        yield cluster.name, name, fit.recipe.describe(), fit.sync, budget, *sizes, f"{cluster.memory_bytes / 1e9:.0f}"


if __name__ == "__main__":
    main()
