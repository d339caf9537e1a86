"""Simulates a planned step with effects that its prediction ignores: noise, a slow rank, shared links, slow launches.

A micro-batch is `other + max(attention, (1 - s) ring) + s ring` seconds long, as the cost model has it. Its start
follows from its ranks' earlier micro-batches, or from the wave before. Rings across nodes may share each node's
network: of k that run at a time, each moves its bytes k times as slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fcp_cli.cost.formula import PackParts, overlapped_seconds
from fcp_cli.cost.model import encoder_seconds, group_terms, halo_seconds, pack_parts
from fcp_cli.plan.pricing import crosses_nodes, pack_work, ranks_together, wave_encoder_seconds
from fcp_cli.plan.step import sizes_of
from fcp_cli.planning.assemble import with_heads
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray

NOISE: Final = 0.05
SLOW_RANK: Final = 1.2
LAUNCH_SECONDS: Final = 0.02
"""Host time to launch the kernels of one hop in all layers, forward and backward: 36 layers of 0.55 ms."""
_DRAWS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The micro-batches of one step, in their global order, and the parts of their seconds.

    Attributes:
        waves: ranks wait for each other after each wave; else a micro-batch starts once its ranks are free.
        num_ranks, ranks_per_node: ranks r with equal r // ranks_per_node share a node.
        wave: [microbatches] ascending where there are waves.
        rank_offsets, ranks: of the micro-batches' groups.
        encoder: [microbatches] seconds before lockstep ranks begin; else 0 and part of `other`.
        other, attention, hidden, exposed: [microbatches] seconds; see `cost.formula.PackParts`.
        floor_seconds: least time of a wave.
        closing_seconds: after the last micro-batch.
    """

    waves: bool
    num_ranks: int
    ranks_per_node: int
    wave: Int32Array
    rank_offsets: IntArray
    ranks: Int32Array
    encoder: FloatArray
    other: FloatArray
    attention: FloatArray
    hidden: FloatArray
    exposed: FloatArray
    floor_seconds: float = 0.0
    closing_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.other)

    @property
    def degrees(self) -> IntArray:
        """[microbatches] ranks of each."""
        return np.diff(self.rank_offsets)

    def seconds(self, sharing: float = 1.0) -> FloatArray:
        """Return [microbatches] seconds without the encoder's, where each ring is one of `sharing` on its links."""
        parts = PackParts(self.other, self.attention, self.hidden * sharing, self.exposed * sharing)
        return np.asarray(overlapped_seconds(parts))

    def slowed(self, factor: FloatArray) -> Execution:
        """Return the step with the computation of each micro-batch slowed by its factor [microbatches]."""
        return replace(
            self, encoder=self.encoder * factor, other=self.other * factor, attention=self.attention * factor
        )


def step_seconds(execution: Execution, *, shared_links: bool = False) -> float:
    """Return the end of the step.

    Args:
        execution: of the step.
        shared_links: rings across nodes share each node's network instead of having it to themselves.
    """
    run = _shared if shared_links else _alone
    if not execution.waves:
        return run(execution, np.arange(len(execution)), execution.encoder) + execution.closing_seconds
    end = 0.0
    first_rows = np.flatnonzero(np.diff(execution.wave)) + 1
    for rows in np.split(np.arange(len(execution)), first_rows):
        lasts = float(execution.encoder[rows].max()) + run(execution, rows, np.zeros(len(execution)))
        end += max(execution.floor_seconds, lasts)
    return end + execution.closing_seconds


def _groups(execution: Execution, rows: IntArray) -> list[list[int]]:
    offsets, ranks = execution.rank_offsets, execution.ranks
    return [ranks[offsets[row] : offsets[row + 1]].tolist() for row in rows.tolist()]


def _alone(execution: Execution, rows: IntArray, before: FloatArray) -> float:
    """Return the end of the last of some micro-batches, in seconds, if rings share no links."""
    free = [0.0] * execution.num_ranks
    lasts = (execution.seconds() + before)[rows].tolist()
    for group, seconds in zip(_groups(execution, rows), lasts, strict=True):
        end = max(free[rank] for rank in group) + seconds
        for rank in group:
            free[rank] = end
    return max(free)


def _shared(execution: Execution, rows: IntArray, before: FloatArray) -> float:
    """Return the same for rings across nodes that share links: between events, each ring runs at its own pace.

    A ring is one of as many as cross on the node where most do.
    """
    groups = _groups(execution, rows)
    nodes = [{rank // execution.ranks_per_node for rank in group} for group in groups]
    crosses = [len(on) > 1 for on in nodes]
    first_rows = _queues(groups, execution.num_ranks)
    waiting_for = [len(group) for group in groups]  # ranks that are not there yet
    left = [1.0] * len(groups)
    alone = (execution.seconds() + before)[rows]
    now, active = 0.0, set[int]()
    heads = [queue[0] for queue in first_rows if queue]
    place = [0] * execution.num_ranks
    for row in heads:
        waiting_for[row] -= 1
        if waiting_for[row] == 0:
            active.add(row)
    while active:
        crossing = [on for row in active if crosses[row] for on in nodes[row]]
        rings_on = np.bincount(crossing) if crossing else np.zeros(0, dtype=np.int64)
        running = sorted(active)
        sharing = np.array([max(rings_on[list(nodes[row])]) if crosses[row] else 1 for row in running])
        own = alone[running]
        for at in np.flatnonzero(sharing > 1).tolist():
            row = int(rows[running[at]])
            own[at] = execution.seconds(float(sharing[at]))[row] + before[row]
        remaining = own * np.array([left[row] for row in running])
        step = float(remaining.min())
        now += step
        for row, seconds, rest in zip(running, own.tolist(), remaining.tolist(), strict=True):
            if rest > step * (1 + 1e-12):
                left[row] -= step / seconds
                continue
            active.discard(row)
            for rank in groups[row]:
                place[rank] += 1
                if place[rank] < len(first_rows[rank]):
                    following = first_rows[rank][place[rank]]
                    waiting_for[following] -= 1
                    if waiting_for[following] == 0:
                        active.add(following)
    return now


def _queues(groups: list[list[int]], num_ranks: int) -> list[list[int]]:
    """Return the micro-batches of each rank, in order."""
    queues: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, group in enumerate(groups):
        for rank in group:
            queues[rank].append(row)
    return queues


def _noise(execution: Execution) -> float:
    """Every micro-batch scatters by 5 %; the mean over draws that are the same for every step of as many rows."""
    ends = []
    for draw in range(_DRAWS):
        scatter = np.random.default_rng((draw, len(execution))).standard_normal(len(execution))
        ends.append(step_seconds(execution.slowed(np.exp(NOISE * scatter - NOISE * NOISE / 2.0))))
    return float(np.mean(ends))


def _slow_rank(execution: Execution) -> float:
    """One rank computes 20 % slower, and with it each of its rings; the mean over ranks all over the job."""
    ends = []
    for rank in np.linspace(0, execution.num_ranks, _DRAWS, endpoint=False).astype(int).tolist():
        meets = np.logical_or.reduceat(execution.ranks == rank, execution.rank_offsets[:-1])
        ends.append(step_seconds(execution.slowed(np.where(meets, SLOW_RANK, 1.0))))
    return float(np.mean(ends))


def _launches(execution: Execution) -> float:
    """No hop's attention takes less than its launch."""
    degrees = execution.degrees
    hops = np.where(degrees > 1, degrees, 0)
    return step_seconds(replace(execution, attention=np.maximum(execution.attention, hops * LAUNCH_SECONDS)))


EFFECTS: Final[Mapping[str, Callable[[Execution], float]]] = {
    "noise": _noise,
    "slow rank": _slow_rank,
    "shared link": lambda execution: step_seconds(execution, shared_links=True),
    "launches": _launches,
}
"""Name to the seconds that a step takes under it."""


def execution_of(assignment: Assignment, batch: Batch, problem: Problem) -> Execution:
    """Take the seconds of an answer apart."""
    profile, offsets = problem.profile, assignment.member_offsets
    degree = sizes_of(assignment.rank_offsets)
    pack = pack_work(batch.work.take(assignment.members), offsets, degree, profile, problem.padding_multiple)
    waves = problem.sync == "microbatch"
    encoder = np.zeros(len(degree))
    if waves and profile.step.lockstep:
        encoder = encoder_seconds(pack, profile) / degree
    assignment = with_heads(assignment, batch, problem)
    heads = np.int64(1) if assignment.heads_degree is None else assignment.heads_degree
    together = ranks_together(assignment.rank_offsets, assignment.ranks, problem.ranks_per_node)
    place = {
        "degree": degree,
        "crosses_nodes": crosses_nodes(assignment.rank_offsets, assignment.ranks, problem.ranks_per_node),
        "heads_degree": heads,
        "sets_cross_nodes": together % heads != 0,
    }
    parts = pack_parts(profile, pack, **place)
    other = parts.other - encoder
    if pack.windows is not None:
        other = other + halo_seconds(profile, pack.windows, group_terms(profile, **place))
    if batch.encoder_seconds is not None:
        shared = wave_encoder_seconds(batch.encoder_seconds[assignment.members], offsets, assignment.wave)
        encoder = shared / problem.num_ranks
    return Execution(
        waves=waves,
        num_ranks=problem.num_ranks,
        ranks_per_node=problem.ranks_per_node,
        wave=assignment.wave,
        rank_offsets=assignment.rank_offsets,
        ranks=assignment.ranks,
        encoder=encoder,
        other=other,
        attention=parts.attention,
        hidden=parts.hidden,
        exposed=parts.exposed,
        floor_seconds=profile.step.floor_seconds(problem.sync),
        closing_seconds=profile.step.closing_seconds(problem.sync),
    )


def stressed_seconds(assignment: Assignment, batch: Batch, problem: Problem) -> Mapping[str, float]:
    """Return the seconds of a step under each effect alone."""
    execution = execution_of(assignment, batch, problem)
    return {name: effect(execution) for name, effect in EFFECTS.items()}
