"""Output of `fcp compare`: a table of 80 columns, or a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fcp_cli.console import new_table, print_table
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.planning.dataset.comparison import Contender
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import strategy

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def ranked(contenders: Sequence[Contender]) -> list[Contender]:
    """Sort by step time under each strategy's best sync; strategies that failed come last."""
    return sorted(contenders, key=lambda one: one.best.step_seconds if one.best else float("inf"))


def print_comparison(console: Console, contenders: Sequence[Contender], syncs: Sequence[Sync]) -> None:
    """Print a row per strategy, fastest first, and below the table why others failed."""
    print_table(console, _table(ranked(contenders), syncs))
    for contender in contenders:
        if contender.refusal:
            who = "" if contender.name in contender.refusal else f"{contender.name}: "
            console.print(f"{who}{contender.refusal}", markup=False, soft_wrap=True)


def _table(contenders: Sequence[Contender], syncs: Sequence[Sync]) -> Table:
    caption = "over: micro-batches over the token budget, which would run out of memory"
    if len(syncs) > 1:
        caption = f"seconds per step under each sync; other columns are under the faster one\n{caption}"
    own = [one.name for one in contenders if one.best and strategy(one.name).own_execution]
    if own:
        caption += f"\n{', '.join(own)}: needs an execution that fcp lacks; compared with its own bound"
    # Nine columns fit into 80 characters with single spaces.
    names = ("strategy", *syncs, "slower", "gap", "idle", "groups", "over", "ms/step")
    table = new_table(*names, show_edge=False, padding=0, caption=caption, caption_justify="left")
    fastest = min((one.best.step_seconds for one in contenders if one.best), default=1.0)
    for contender in contenders:
        table.add_row(contender.name, *_cells(contender, syncs, fastest))
    return table


def _cells(contender: Contender, syncs: Sequence[Sync], fastest_seconds: float) -> list[str]:
    best = contender.best
    if best is None:
        return ["-"] * (len(syncs) + 6)
    return [
        *(f"{found.step_seconds:#.4g}" if (found := contender.outcomes.get(sync)) else "-" for sync in syncs),
        f"{best.step_seconds / fastest_seconds:.2f}x",
        _percent(best.gap),
        _percent(best.idle_fraction),
        str(best.distinct_groups),
        str(best.over_budget),
        f"{1e3 * best.planning_seconds:.3g}" if best.planning_seconds < 1 else f"{1e3 * best.planning_seconds:.0f}",
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"


def comparison_document(contenders: Sequence[Contender], problem: Problem, *, steps: int) -> dict[str, Any]:
    """Return all outcomes for `--json`, fastest strategy first."""
    return {
        "num_ranks": problem.num_ranks,
        "ranks_per_node": problem.ranks_per_node,
        "tensor_parallel": problem.tensor_parallel,
        "pipeline_parallel": problem.pipeline_parallel,
        "tokens_per_rank": problem.tokens_per_rank,
        "padding_multiple": problem.padding_multiple,
        "profile": {
            "model": problem.profile.model,
            "cluster": problem.profile.cluster,
            "origin": problem.profile.origin,
        },
        "steps": steps,
        "strategies": [_contender_document(contender) for contender in ranked(contenders)],
    }


def _contender_document(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "best_sync": contender.best.sync if contender.best else None,
        "refusal": contender.refusal or None,
        "outcomes": {sync: asdict(outcome) for sync, outcome in contender.outcomes.items()},
    }
