"""What recomputing by stage gains in pipelines: `python -m benchmarks.pipeline_recomputation`.

Stage s of P holds at most P - s micro-batches between their forwards and backwards, so that later stages need less
recomputation than the first. Predicted seconds of a step of 512 sequences under ZeRO-1, each rule at the best of its
token budgets, all priced by the same exact timeline:

    one kind   the quickest recipe that recomputes nothing, all but attention, or all, in all layers
    alike      in as many layers on every stage, which the first needs for full micro-batches
    by stage   `--recompute as-needed`: in as many layers as each stage needs for full micro-batches
    no limit   nothing, at these budgets: no choice by stage or by micro-batch is quicker
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

import numpy as np

from benchmarks.workloads import family_table
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import all_fits
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.recipe import RecipeData, sampled_seconds
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.util.console import Assumptions

TENSOR = {"qwen3-8b": 1, "llama3-70b": 8}
RULES = ("one kind", "alike", "by stage", "no limit")


def row(model: str, cluster: str, stages: int, table: LengthTable) -> list[float]:
    """Return the seconds of a step under each of `RULES`."""
    data = RecipeData(table=table, settings=BatchSettings(global_batch_size=len(table), shuffle=False))
    request = PlanRequest(
        model=model,
        cluster=cluster,
        ranks=64 // stages if TENSOR[model] == 1 else 8,
        tensor_parallel=TENSOR[model],
        pipeline_parallel=stages,
        recipe=RecipeRequest(zero="1", loss="chunked"),
    )
    one_kind, _ = resolve_problem(request, Assumptions(), data=data)
    asked = replace(request, recipe=RecipeRequest(zero="1", loss="chunked", recompute="as-needed"))
    staged, budget = resolve_problem(asked, Assumptions(), data=data)
    assert budget.room is not None
    alike, free = [], []
    for fit in all_fits(budget.room.spec, asked.recipe, budget.room.place, sync=staged.sync):
        problem, _ = resolve_problem(
            replace(asked, tokens_per_rank=fit.tokens, sync=fit.sync), Assumptions(), data=data
        )
        if not data.fits_into(problem):
            continue
        assert problem.pipeline is not None
        again = problem.pipeline.recompute_seconds_per_token
        alike.append(_with(problem, [max(again)] * stages))
        free.append(_with(problem, []))
    quickest = [min(sampled_seconds(one, [table]) for one in problems) for problems in (alike, free)]
    return [sampled_seconds(one_kind, [table]), quickest[0], sampled_seconds(staged, [table]), quickest[1]]


def _with(problem: Problem, again: list[float]) -> Problem:
    """Return a problem whose stages recompute for other seconds per token."""
    pipeline, profile = problem.pipeline, problem.profile
    assert pipeline is not None
    changed = replace(pipeline, recompute_seconds_per_token=tuple(again))
    linear = profile.coefficients.linear_seconds_per_token
    linear += changed.mean_recompute_seconds - pipeline.mean_recompute_seconds
    coefficients = replace(profile.coefficients, linear_seconds_per_token=linear)
    return replace(problem, pipeline=changed, profile=replace(profile, coefficients=coefficients))


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TENSOR))
    parser.add_argument("--clusters", nargs="+", default=["h100-8x8", "ascend910b-8x8"])
    parser.add_argument("--families", nargs="+", default=["github", "commoncrawl"])
    parser.add_argument("--stages", nargs="+", type=int, default=[4, 8])
    options = parser.parse_args()
    print(f"| model | cluster | P | lengths | {' | '.join(RULES)} |\n|---|---|---:|---|{'---:|' * len(RULES)}")
    ratios = []
    cells = itertools.product(options.families, options.stages, options.clusters, options.models)
    for family, stages, cluster, model in cells:
        values = row(model, cluster, stages, family_table(family, sequences=512, seed=0))
        ratios.append(np.array(values) / values[0])
        words = " | ".join(f"{value:.2f}" for value in values)
        print(f"| {model} | {cluster} | {stages} | {family} | {words} |", flush=True)
    means = np.exp(np.mean(np.log(ratios), axis=0))
    print(f"\ngeometric mean: {', '.join(f'{rule} {mean:.3f}' for rule, mean in zip(RULES, means, strict=True))}")


if __name__ == "__main__":
    main()
