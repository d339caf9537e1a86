"""The recipe chosen by the predicted time of the data against the first of the fixed order, cell by cell.

    python -m benchmarks.recipes
    python -m benchmarks.recipes --models qwen3-8b --clusters h100-8x8 --lengths lengths.parquet --steps 16

A row is one model on one cluster under one set of lengths, 512 a step: seconds of a step under the first recipe that
leaves 16,384 tokens a rank, and under the one that `fcp plan` chooses on its sample of steps, both over the whole plan;
processor seconds of the search, and of planning the steps. `--lengths` adds files of lengths. `--gradient-bytes 2`
prices gradients that ranks keep and sum in bf16, which no trainer here does, under both recipes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.workloads import FAMILIES, family_table, real_table
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory import items
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.recipe import RecipeData, sampled_seconds
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.util.console import Assumptions

MODELS = ("qwen3-8b", "qwen3-vl-8b", "llama3-70b", "qwen3-30b-a3b")
CLUSTERS = ("h100-8x8", "a100-8x8", "h200-8x8", "ascend910b-8x8")


def main() -> None:
    """Print the table as Markdown, and the geometric mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--lengths", nargs="*", type=Path, default=(), help="manifests with a column length")
    parser.add_argument("--steps", type=int, default=8, help="of the whole plan")
    parser.add_argument("--gradient-bytes", type=int, default=4, help="of a gradient that a rank keeps, in bf16")
    options = parser.parse_args()
    items._PRECISIONS["bf16"] = replace(items._PRECISIONS["bf16"], gradient=options.gradient_bytes)
    size = 512 * options.steps
    tables = {family: family_table(family, sequences=size, seed=0) for family in options.families}
    tables |= {path.stem: _first(real_table(path), size) for path in options.lengths}
    print("| model | cluster | lengths | fixed order | s | chosen | s | less | search s | planning s |")
    print("|---|---|---|---|---:|---|---:|---:|---:|---:|")
    ratios = [
        ratio
        for model, cluster in itertools.product(options.models, options.clusters)
        for ratio in _print_cells(model, cluster, tables)
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\ngeometric mean {1 - mean:.1%} less, least {1 - max(ratios):.1%}, most {1 - min(ratios):.1%}")


def _first(table: LengthTable, size: int) -> LengthTable:
    rows = np.random.default_rng(0).permutation(len(table))[:size]
    return table.take(rows)


def _print_cells(model: str, cluster: str, tables: Mapping[str, LengthTable]) -> list[float]:
    ratios = []
    request = PlanRequest(model=model, cluster=cluster, ranks=64)
    for name, table in tables.items():
        data = RecipeData(table=table, settings=BatchSettings(global_batch_size=512))
        usual, _ = resolve_problem(request, Assumptions())
        start = time.process_time()
        chosen, _ = resolve_problem(request, Assumptions(), data=data)
        searched = time.process_time() - start
        if not data.fits_into(usual):
            print(f"| {model} | {cluster} | {name} | too few tokens | | {_words(chosen)} | | | {searched:.2f} | |")
            continue
        batches = GlobalBatches(table, chosen, data.settings)
        steps = [table.take(batches.batch(step).rows) for step in range(len(batches))]
        before = sampled_seconds(usual, steps)
        start = time.process_time()
        after = sampled_seconds(chosen, steps)
        planned = time.process_time() - start
        ratios.append(after / before)
        print(
            f"| {model} | {cluster} | {name} | {_words(usual)} | {before:.3f} | {_words(chosen)} | {after:.3f} "
            f"| {1 - after / before:.1%} | {searched:.2f} | {planned:.2f} |",
            flush=True,
        )
    return ratios


def _words(problem: Problem) -> str:
    recipe = problem.recipe
    assert recipe is not None
    parts = [f"ZeRO-{recipe.zero_stage} over {recipe.shards(problem.num_ranks)}", recipe.recompute]
    parts += ["offload"] if recipe.offload != "none" else []
    parts += ["reduce step"] if recipe.zero_stage == 3 and recipe.reduce == "step" else []
    return f"{', '.join(parts)}, {problem.tokens_per_rank:,}"


if __name__ == "__main__":
    main()
