"""Compares answers of solvers under effects that the cost model ignores; see `simulation.effects`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcp_cli.cost.model import encoder_seconds, group_terms, halo_seconds, pack_parts
from fcp_cli.plan.pricing import crosses_nodes, pack_work, ranks_together, wave_encoder_seconds
from fcp_cli.plan.step import sizes_of
from fcp_cli.planning.assemble import with_heads
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.simulation.effects import EFFECTS, Execution


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
