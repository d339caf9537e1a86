"""Output of `fcp compare`: a table of 80 columns, or a JSON document."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.compare import Contender
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import strategy
from fcp_cli.planning.verdict import MEGATRON, Rival, Verdict
from fcp_cli.util.console import new_table, print_table
from fcp_cli.util.words import counted

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


def comparison_document(contenders: Sequence[Contender], problem: Problem, *, steps: Sequence[int]) -> dict[str, Any]:
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
        "steps": len(steps),
        "compared_steps": list(steps),
        "strategies": [_contender_document(contender) for contender in ranked(contenders)],
    }


def _contender_document(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "best_sync": contender.best.sync if contender.best else None,
        "refusal": contender.refusal or None,
        "outcomes": {sync: asdict(outcome) for sync, outcome in contender.outcomes.items()},
    }


_WIDTH, _MOST_LINES = 80, 4
_WHOLE_FLAGS: Final[dict[str, Any]] = {"break_long_words": False, "break_on_hyphens": False}
_EQUAL = 0.0005  # rounds to zero when shown
_ALIKE = 0.01  # below this gain, a plan is not worth the effort


def verdict_lines(verdict: Verdict) -> list[str]:
    """Say whether a plan pays off, what it saves, and which remedies would help more."""
    sentences = list(_sentences(verdict))
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, _WIDTH, **_WHOLE_FLAGS)]
    return lines if len(lines) <= _MOST_LINES else textwrap.wrap(" ".join(sentences), _WIDTH, **_WHOLE_FLAGS)


def _sentences(verdict: Verdict) -> Iterator[str]:
    best = verdict.quickest_rival
    if best is None:
        return
    gain = 1.0 - 1.0 / best.factor
    where = f" on {counted(verdict.num_ranks, 'example rank')}" if verdict.is_example else ""
    if gain >= _ALIKE:
        yield f"Worth it{where}: {verdict.solver} takes {gain:.0%} less time than {best.label}{_range(best, verdict)}."
    else:
        best = _simplest(best, verdict)
        gain = 1.0 - 1.0 / best.factor
        if gain <= -_ALIKE:
            than = f"is {1 - best.factor:.0%} quicker"
        else:
            than = "takes as long" if abs(gain) < _EQUAL else f"takes {abs(gain):.1%} {'more' if gain > 0 else 'less'}"
        condition = " if you train with Megatron" if best.name == MEGATRON else ""
        yield f"Not worth it{where}: {best.label} {than}; use it{condition}."
    hours, saved = verdict.device_hours, verdict.saved_device_hours
    each = [f"{verdict.solver} {_amount(hours)}"]
    by_name = {one.name: one for one in verdict.rivals}
    shown = (by_name[name] for name in dict.fromkeys(("static", MEGATRON, best.name)) if name in by_name)
    each += [f"{one.label} {_amount(one.factor * hours)}" for one in shown]
    price = verdict.device_hour_price
    money = f"; {_amount(saved * price)} saved at {price:g} each" if price is not None and gain >= _ALIKE else ""
    yield f"Device-hours an epoch: {', '.join(each)}{money}."
    remedy = verdict.remedy
    if verdict.enough_ranks is not None:
        some = counted(verdict.enough_ranks, "rank")
        yield f"{verdict.num_ranks} ranks are too many for these batches: {some} with this budget would be as fast."
    elif remedy is not None:
        room = "" if "--tokens-per-rank" in remedy.flags else f" ({counted(remedy.tokens_per_rank, 'token')} a rank)"
        yield f"What helps more: {remedy.flags}{room}: {1 - remedy.factor:.0%} less."
    elif verdict.tried and verdict.profile is not None:
        way = "plan without it to search others" if verdict.profile == "analytic" else "fcp profile measures others"
        yield f"No other sync or token budget would help; the profile is of this recipe: {way}."
    elif verdict.tried:
        yield "No other recomputation, sync or token budget that fits would help."


def _range(rival: Rival, verdict: Verdict) -> str:
    """Return the gain of single steps, and how many were compared; "" if they are all of an epoch and alike."""
    least, most = (f"{1.0 - 1.0 / factor:.0%}" for factor in rival.spread)
    spread = least if least == most else f"{least.removesuffix('%')} to {most}"
    compared = len(verdict.steps)
    if compared == verdict.steps_per_epoch:
        return "" if least == most else f" ({spread} a step)"
    return f" ({spread} on {compared} of {counted(verdict.steps_per_epoch, 'step')})"


def _simplest(best: Rival, verdict: Verdict) -> Rival:
    """Return the static plan if it is about as fast as the best rival: every framework supports it."""
    static = next((one for one in verdict.rivals if one.name == "static"), best)
    return static if static.factor < best.factor + _ALIKE and 1.0 - 1.0 / static.factor < _ALIKE else best


def _amount(value: float) -> str:
    """Format with three digits, or as an integer from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
