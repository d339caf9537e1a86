"""A wave whose ranks recompute as needed: no sequence is left over that a group could still run by the target."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.cost.model import Work, group_seconds
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.compiled import waves
from fcp_cli.planning.compiled.core import Sequences
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.searches import NOBODY, NOWHERE
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.console import Assumptions
from tests.planning.examples import compile_planner, long_tail


def test_a_group_with_room_is_never_hidden_by_the_recomputation_of_further_tokens() -> None:
    """Of each wave: sequences that later ones take, and a single rank could have run, find no group with room."""
    compile_planner()
    request = PlanRequest(
        model="qwen3-8b", cluster="h100", ranks=16, recipe=RecipeRequest(recompute="as-needed", zero="3")
    )
    problem = resolve_problem(request, Assumptions())[0]
    _order, sequences = by_falling_work(batch_of(long_tail(400), problem).work)
    inputs = planner_inputs(problem)
    _step_seconds, found = waves.planned(
        0, np.inf, waves.Effort(tries=24, fills=16), True, NOBODY, NOWHERE, sequences, inputs
    )
    wave_of, levels = found.wave[found.group_of], problem.profile.recompute_levels
    later, recomputing = 0, 0
    for group in range(len(found.wave)):
        wave, first, degree = (int(one[group]) for one in (found.wave, found.first, found.degree))
        members = np.flatnonzero(found.group_of == group)
        held = int(sequences.tokens[members].sum())
        recomputing += held > degree * levels[0].tokens
        alone = _seconds(np.arange(len(sequences.tokens)), np.zeros(0, dtype=np.int64), 0, 1, problem, sequences)
        fits = (sequences.tokens <= inputs.tokens_per_rank) & (
            alone <= found.targets[wave]
        )  # others need rings of their own
        waiting = np.flatnonzero((wave_of > wave) & fits)
        later += len(waiting)
        with_it = _seconds(waiting, members, first, degree, problem, sequences)
        has_tokens = held + sequences.tokens[waiting] <= degree * inputs.tokens_per_rank
        assert not np.any(has_tokens & (with_it <= found.targets[wave]))
    assert later > 100 and recomputing > 4


def _seconds(each: IntArray, held: Any, first: int, degree: int, problem: Problem, sequences: Sequences) -> FloatArray:
    """The seconds of each of these sequences in a pack with those that a group of neighbouring ranks holds."""
    load = [values[each] + values[held].sum() for values in (sequences.attention, sequences.linear, sequences.tokens)]
    work = Work(attention_seconds=load[0], linear_seconds=load[1], tokens=load[2].astype(np.int64))
    across = first // problem.ranks_per_node != (first + degree - 1) // problem.ranks_per_node
    return group_seconds(problem.profile, work, degree=degree, crosses_nodes=int(across))
