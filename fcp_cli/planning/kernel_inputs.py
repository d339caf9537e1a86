"""Turn problems and batches into the arrays and numbers that the compiled planner works on."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.cost.model import Work, exchanged_bytes_per_token, reach_tokens, token_in_window_seconds
from fcp_cli.planning.compiled.core import Machine, Sequences, Splits
from fcp_cli.planning.compiled.ways import tabulated
from fcp_cli.planning.problem import Problem


def changed(machine: Machine, **fields: Any) -> Machine:
    """Return a machine on which something costs otherwise, or ranks hold other numbers of tokens."""
    machine = machine._replace(**fields)
    splits = machine.splits
    return machine._replace(splits=tabulated(machine)) if splits.only or len(splits.heads) else machine


_last: tuple[Problem, Machine] | None = None


def machine_of(problem: Problem, groups: list[range] | None = None, *, whole_nodes: bool = False) -> Machine:
    """Return ranks, token budget and cost of a problem.

    Rings may use the given groups only (widest first), or all groups of neighbouring ranks; with `whole_nodes` those
    across nodes must be of whole ones. The last answer for a problem alone is kept: a step's bounds ask again and
    again, and tabulating ways to split heads takes longer.
    """
    global _last
    if groups or whole_nodes:
        return _made(problem, groups or [], whole_nodes)
    last = _last
    if last is None or last[0] is not problem:
        _last = last = problem, _made(problem, [], whole_nodes)
    return last[1]


def _made(problem: Problem, groups: list[range], whole_nodes: bool) -> Machine:
    c, bandwidth = problem.profile.coefficients, problem.profile.bandwidth
    allowed = np.zeros(problem.num_ranks + 1, dtype=np.int64)
    allowed[[1, *map(len, groups)] if groups else slice(None)] = 1
    machine = Machine(
        num_ranks=problem.num_ranks,
        ranks_per_node=min(problem.ranks_per_node, problem.num_ranks),
        tokens_per_rank=problem.tokens_per_rank,
        beta=c.microbatch_seconds,
        intra=c.ring_bytes_per_token / bandwidth.intra_node,
        inter=c.ring_bytes_per_token / bandwidth.inter_node,
        hop=c.ring_hop_seconds,
        home_intra=c.last_hop_bytes_per_token / bandwidth.intra_node,
        home_inter=c.last_hop_bytes_per_token / bandwidth.inter_node,
        home=c.last_hop_seconds,
        exposed=c.exposed_ring_share,
        chunk=c.chunk_seconds_per_token,
        reach=reach_tokens(c) if c.halo_bytes_per_token else 0,
        halo_intra=c.halo_bytes_per_token / bandwidth.intra_node,
        halo_inter=c.halo_bytes_per_token / bandwidth.inter_node,
        halo_message=c.halo_message_seconds,
        floor=problem.profile.step.floor_seconds(problem.sync),
        padding=problem.padding_multiple or 0,
        padding_seconds=c.linear_seconds_per_token + (token_in_window_seconds(c) if c.halo_bytes_per_token else 0.0),
        group_first=np.array([group.start for group in groups], dtype=np.int64),
        group_degree=np.array([len(group) for group in groups], dtype=np.int64),
        allowed=allowed,
        whole_nodes=int(whole_nodes),
        splits=_splits_of(problem),
    )
    return changed(machine)


def without_splits(machine: Machine) -> Machine:
    """Return the machine on which groups are rings."""
    return machine._replace(splits=_no_splits())


def _splits_of(problem: Problem) -> Splits:
    """Return how groups may split heads: inside nodes beside rings, or any number of ranks in place of rings."""
    heads, bandwidth = problem.profile.heads, problem.profile.bandwidth
    if problem.attention is None or heads is None:
        return _no_splits()
    only = problem.attention == "ulysses"
    u = np.array(heads.degrees(problem.num_ranks if only else min(problem.num_ranks, problem.ranks_per_node)))
    u = u.astype(np.int64)
    size = exchanged_bytes_per_token(heads, u)
    return _no_splits()._replace(
        heads=u,
        copies=np.maximum(1.0, u / heads.key_value_heads),
        inside=size / (bandwidth.intra_node * heads.bandwidth_share),
        across=size / (bandwidth.inter_node * heads.bandwidth_share),
        messages=np.asarray(heads.exchange_seconds * (u - 1.0), dtype=np.float64),
        only=int(only),
    )


def _no_splits() -> Splits:
    none = np.zeros(0)
    return Splits(
        heads=np.zeros(0, dtype=np.int64),
        copies=none,
        inside=none,
        across=none,
        messages=none,
        only=0,
        lies=np.zeros(0, dtype=np.int64),
        first=np.zeros((0, 0), dtype=np.int64),
        ways=np.zeros((0, 7)),
    )


def in_batch_order(work: Work) -> Sequences:
    """Return the sequences as they stand in the batch."""
    return Sequences(
        attention=work.attention_seconds, linear=work.unhidden_seconds, work=work.total_seconds, tokens=work.tokens
    )


def by_falling_work(work: Work) -> tuple[IntArray, Sequences]:
    """Return positions in the batch by falling work (ties by position), and the sequences in that order."""
    total = work.total_seconds
    order = np.argsort(-total, kind="stable")
    return order, Sequences(
        attention=work.attention_seconds[order],
        linear=work.unhidden_seconds[order],
        work=total[order],
        tokens=work.tokens[order],
    )
