"""Conversion of problems and batches into the arrays and numbers that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fcp_cli.cost.formula import recomputation_seconds
from fcp_cli.cost.levels import cheapest_tokens
from fcp_cli.cost.model import Work, token_in_window_seconds, unit_prices
from fcp_cli.planning.compiled.core import TERMS, PlannerInputs, Sequences, Splits, tabulated
from fcp_cli.planning.problem import Problem
from fcp_cli.util.arrays import IntArray


def changed(inputs: PlannerInputs, **fields: Any) -> PlannerInputs:
    """Return inputs with other fields, and the table of ways computed anew."""
    inputs = inputs._replace(**fields)
    return inputs._replace(splits=tabulated(inputs))


def repriced(inputs: PlannerInputs, **prices: Any) -> PlannerInputs:
    """Return inputs with other unit prices, and the table of ways computed anew."""
    return changed(inputs, prices=inputs.prices._replace(**prices))


_last: tuple[Problem, PlannerInputs] | None = None


def planner_inputs(problem: Problem, groups: list[range] | None = None, *, whole_nodes: bool = False) -> PlannerInputs:
    """Return ranks, token budget and prices of a problem.

    Rings may only use the given groups (widest first), or all groups of neighbouring ranks; with `whole_nodes`, groups
    across nodes must consist of whole nodes. The last answer without either is cached, since the bounds of a step ask
    repeatedly and tabulating Ulysses degrees takes time.
    """
    global _last
    if groups or whole_nodes:
        return _made(problem, groups or [], whole_nodes)
    last = _last
    if last is None or last[0] is not problem:
        _last = last = problem, _made(problem, [], whole_nodes)
    return last[1]


def _made(problem: Problem, groups: list[range], whole_nodes: bool) -> PlannerInputs:
    c = problem.profile.coefficients
    allowed = np.zeros(problem.num_ranks + 1, dtype=np.int64)
    allowed[[1, *map(len, groups)] if groups else slice(None)] = 1
    inputs = PlannerInputs(
        num_ranks=problem.num_ranks,
        ranks_per_node=min(problem.ranks_per_node, problem.num_ranks),
        tokens_per_rank=problem.tokens_per_rank,
        shared_tokens=shared_tokens(problem),
        prices=unit_prices(problem.profile),
        # No wave ends before its hosts have issued it.
        floor=max(problem.profile.step.floor_seconds(problem.sync), c.host_microbatch_seconds),
        fill=0.0,
        padding=problem.padding_multiple or 0,
        padding_seconds=c.linear_seconds_per_token + (token_in_window_seconds(c) if c.halo_bytes_per_token else 0.0),
        group_first=np.array([group.start for group in groups], dtype=np.int64),
        group_degree=np.array([len(group) for group in groups], dtype=np.int64),
        allowed=allowed,
        whole_nodes=int(whole_nodes),
        splits=_splits_of(problem),
    )
    return changed(inputs)


def shared_tokens(problem: Problem, fixed_seconds: float | None = None) -> int:
    """Return the tokens of a rank's micro-batch with the least recomputation and fixed seconds per token."""
    levels, tokens = problem.profile.priced_levels, problem.tokens_per_rank
    fixed = problem.profile.coefficients.microbatch_seconds if fixed_seconds is None else fixed_seconds
    return min(tokens, cheapest_tokens(levels, fixed)) if levels else tokens


def with_recomputation(sequences: Sequences, inputs: PlannerInputs) -> Sequences:
    """Return sequences whose single-rank work includes recomputation: alone, or as a share of a full pack's."""
    if not inputs.prices.again.any():
        return sequences
    tokens, full = sequences.tokens, min(inputs.shared_tokens, inputs.tokens_per_rank)
    packed = recomputation_seconds(float(full), 1, inputs.prices) / full * tokens
    alone = recomputation_seconds(tokens.astype(np.float64), 1, inputs.prices)
    return sequences._replace(work=sequences.work + np.where(tokens > full, alone, packed))


def without_splits(inputs: PlannerInputs) -> PlannerInputs:
    """Return inputs whose groups are all plain rings."""
    return changed(inputs, splits=_untabulated([], only=False))


def _splits_of(problem: Problem) -> Splits:
    """Return the allowed Ulysses degrees: sets inside nodes (`2d`), or whole groups (`ulysses`); not yet tabulated."""
    heads = problem.profile.heads
    if problem.attention is None or heads is None:
        return _untabulated([], only=False)
    only = problem.attention == "ulysses"
    most = problem.num_ranks if only else min(problem.num_ranks, problem.ranks_per_node)
    return _untabulated(heads.degrees(most), only=only)


def _untabulated(heads: Sequence[int], *, only: bool) -> Splits:
    rows, first, ways = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64), np.zeros((0, TERMS))
    return Splits(np.array(heads, dtype=np.int64), int(only), rows, first, ways)


def in_batch_order(work: Work) -> Sequences:
    """Return the sequences of a batch in its order."""
    return Sequences(
        attention=work.attention_seconds, linear=work.unhidden_seconds, work=work.total_seconds, tokens=work.tokens
    )


def by_falling_work(work: Work) -> tuple[IntArray, Sequences]:
    """Return [sequences] positions in the batch by falling work (ties by position), and the sequences in that order."""
    total = work.total_seconds
    order = np.argsort(-total, kind="stable")
    return order, Sequences(
        attention=work.attention_seconds[order],
        linear=work.unhidden_seconds[order],
        work=total[order],
        tokens=work.tokens[order],
    )
