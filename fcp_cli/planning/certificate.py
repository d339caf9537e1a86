"""Tightened lower bounds, compiled. Each is proven in the docstring of its function.

Notation: N ranks of budget E tokens; sequence s has attention seconds a, linear seconds l and t tokens on one rank,
work w = a + l; a group of degree d moves c_d seconds of ring traffic per token and hop, c_d that of the network inside
a node for d <= ranks per node (or across nodes, were that faster), else that across nodes. A pack takes at least as
long as any of its sequences alone on the same group, since every term of the cost model grows with every sequence;
T(s, d) is that time.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.plan.step import Int64Array
from fcp_cli.planning.fcp.compiling import discard_stale_kernels, inlined, kernel
from fcp_cli.planning.fcp.core import Machine, Sequences, pack_seconds

_STEPS = 24  # of bisection
_LONGEST = 4  # sequences whose wave is looked at
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


@inlined
def _alone(i: int, degree: int, sequences: Sequences, machine: Machine) -> float:
    crosses = degree > machine.per_node or machine.inter < machine.intra
    return pack_seconds(sequences.attention[i], sequences.linear[i], sequences.tokens[i], degree, crosses, machine)


@kernel
def _traffic(degree: int, machine: Machine) -> float:
    """Rank-seconds of ring traffic per token on a group of this degree."""
    return (machine.inter if degree > machine.per_node else min(machine.intra, machine.inter)) * (degree - 1)


@kernel
def _least_area(i: int, makespan: float, exposed_from: float, sequences: Sequences, machine: Machine) -> float:
    """Least rank-seconds (beside microbatch_seconds) of sequence i if its micro-batch must end within makespan.

    Where c_d (d - 1) >= exposed_from = max over sequences of a / t, ring traffic outlasts attention in every pack of
    degree d: the pack takes d ranks at least sum (l + c_d (d - 1) t) >= sum w. Elsewhere it takes at least sum w.
    """
    least = np.inf
    lowest = max(1, (sequences.tokens[i] + machine.budget - 1) // machine.budget)
    for degree in range(lowest, machine.num_ranks + 1):
        if _alone(i, degree, sequences, machine) > makespan:
            continue
        traffic = _traffic(degree, machine)
        if degree == 1 or traffic < exposed_from:
            return float(sequences.work[i])
        least = min(least, sequences.linear[i] + traffic * sequences.tokens[i])
        if machine.inter >= machine.intra:
            break  # traffic only grows from here on
    return float(least)


@kernel
def _micro_batches(makespan: float, tokens: float, linear_per_token: float, machine: Machine) -> float:
    """Least mean number of micro-batches per rank that hold `tokens` tokens per rank; infinite where none can.

    A rank that runs m micro-batches holds at most m E tokens in them, and, since it works on them for at most
    makespan - m beta seconds, at most (makespan - m beta) / min(l / t). The ranks' mean (m, tokens) lies in the convex
    hull of these points.
    """
    if machine.beta + linear_per_token == 0.0:
        return tokens / machine.budget
    whole = np.floor(makespan / (machine.beta + machine.budget * linear_per_token))
    if tokens <= whole * machine.budget:
        return tokens / machine.budget
    low = whole * machine.budget
    high = (makespan - (whole + 1.0) * machine.beta) / linear_per_token if linear_per_token > 0.0 else np.inf
    high = min(high, (whole + 1.0) * machine.budget)
    if tokens > high:
        return np.inf
    return float(whole + (tokens - low) / (high - low))


@kernel
def area_bound(simple: float, waves: bool, sequences: Sequences, machine: Machine) -> float:
    """The makespan below which not even the areas of all micro-batches fit into N ranks.

    If a schedule of makespan T exists, every micro-batch ends within T, so each sequence takes its least area for T
    (`_least_area`, a function that falls with T), and on top each rank pays beta for each of its micro-batches: on the
    mean at least `_micro_batches` of them and at least one (an idle rank wastes T >= beta), under waves at least
    ceil(tokens / (N E)). Their sum over N must be <= T; bisection keeps the largest T that is refuted.
    """
    n = len(sequences.work)
    tokens = sequences.tokens.sum() / machine.num_ranks
    exposed_from, linear_per_token = 0.0, np.inf
    for i in range(n):
        exposed_from = max(exposed_from, sequences.attention[i] / sequences.tokens[i])
        linear_per_token = min(linear_per_token, sequences.linear[i] / sequences.tokens[i])
    refuted, held = simple * (1.0 - _MARGIN), np.inf
    for _step in range(_STEPS):
        makespan = simple * (1.0 + _MARGIN) if _step == 0 else 0.5 * (refuted + held)
        if held == np.inf and _step:
            makespan = refuted * 1.25
        total = 0.0
        for i in range(n):
            if machine.beta + sequences.work[i] <= makespan and sequences.tokens[i] <= machine.budget:
                total += sequences.work[i]
            else:
                total += _least_area(i, makespan, exposed_from, sequences, machine)
        count = _micro_batches(makespan, tokens, linear_per_token, machine)
        count = max(1.0, np.ceil(tokens / machine.budget - _MARGIN) if waves else count)
        if total / machine.num_ranks + machine.beta * count <= makespan:
            held = makespan
            if _step == 0:
                break
        else:
            refuted = makespan
    return float(refuted)


@kernel
def _densest(tokens: float, skipped: int, by_density: Int64Array, sequences: Sequences) -> float:
    """Most work that so many tokens can hold, sequences taken in fractions, without one of them."""
    work = 0.0
    for i in by_density:
        if i == skipped:
            continue
        if sequences.tokens[i] >= tokens:
            return float(work + sequences.work[i] * tokens / sequences.tokens[i])
        work += sequences.work[i]
        tokens -= sequences.tokens[i]
    return float(work)


@kernel
def _wave_of(
    j: int,
    total: float,
    more_waves: float,
    dense: float,
    thin: float,
    by_density: Int64Array,
    sequences: Sequences,
    machine: Machine,
) -> float:
    """Least makespan under waves, seen from the wave that runs sequence j, over all degrees d that j may have.

    Let the wave last tau = T(j, d) + delta. Beside j it does at most Y + X work. Y, on the N - d other ranks, is at
    most (N - d)(tau - beta), and at most the densest (N - d) E tokens without j. X, more sequences in j's own pack, is
    at most d delta where attention hides j's ring; where it does not, they bring x tokens with
    (c_d (d - 1) + thin) x <= d delta and work <= dense x (thin, dense: least l / t and greatest w / t of any sequence).
    Other waves do the rest of the work, at least rest / N seconds, and pay beta each. The sum is convex and piecewise
    linear in delta: its least value lies at delta = 0 or where Y stops growing. Where X could grow by more than N per
    second, only T(j, d) and the other waves' beta are counted.
    """
    num_ranks, beta = machine.num_ranks, machine.beta
    least = np.inf
    for degree in range(max(1, (sequences.tokens[j] + machine.budget - 1) // machine.budget), num_ranks + 1):
        shortest = _alone(j, degree, sequences, machine)
        if shortest + more_waves >= least:
            continue
        others = num_ranks - degree
        held = _densest(float(others * machine.budget), j, by_density, sequences)
        traffic = _traffic(degree, machine)
        hides = degree == 1 or sequences.attention[j] >= (
            traffic * sequences.tokens[j] + machine.hop * (degree - 1) * degree
        )
        growth = 1.0 * degree
        if not hides:
            growth = max(growth, dense * degree / (traffic + thin))
        if growth > num_ranks:
            least = min(least, shortest + more_waves)
            continue
        value = np.inf
        for corner in range(2):
            delta = 0.0
            if corner:
                delta = held / others - (shortest - beta) if others else 0.0
                if delta <= 0.0:
                    continue
            done = sequences.work[j] + growth * delta + min(others * (shortest + delta - beta), held)
            value = min(value, shortest + delta + more_waves + max(0.0, total - done) / num_ranks)
        least = min(least, value)
    return float(least)


@kernel
def wave_bound(sequences: Sequences, machine: Machine) -> float:
    """The largest of `_wave_of` over the sequences with the most work."""
    n = len(sequences.work)
    total, tokens = sequences.work.sum(), sequences.tokens.sum()
    capacity = machine.num_ranks * machine.budget
    more_waves = machine.beta * max(0, (tokens - 1) // capacity)
    density = sequences.work / sequences.tokens
    by_density = np.argsort(-density, kind="mergesort")
    dense, thin = density.max(), (sequences.linear / sequences.tokens).min()
    best = 0.0
    for j in range(min(_LONGEST, n)):
        if j and sequences.work[j] == sequences.work[j - 1]:
            continue
        best = max(best, _wave_of(j, total, more_waves, dense, thin, by_density, sequences, machine))
    return float(best * (1.0 - _MARGIN))


discard_stale_kernels(area_bound)
