"""Tiny steps are planned as exact waves: none of any packs on any ranks in any order are quicker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.fcp_solver import assign_tiny, make_solver
from fcp_cli.planning.problem import Assignment, Batch, Problem
from tests.planning.test_solver import a_problem, one_batch, planned

_Pack = tuple[int, ...]


def partitions(items: Sequence[int]) -> Iterator[list[_Pack]]:
    """Yield every way to split the items into packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for beside in chain.from_iterable(combinations(rest, n) for n in range(len(rest) + 1)):
        for packs in partitions([item for item in rest if item not in beside]):
            yield [(first, *beside), *packs]


def schedules(batch: Batch, problem: Problem) -> Iterator[Assignment]:
    """Yield every split into packs, in every order, on every group of ranks, in every split into waves."""
    ranks = range(problem.num_ranks)
    groups = list(chain.from_iterable(combinations(ranks, n) for n in range(1, problem.num_ranks + 1)))
    for packs in partitions(range(len(batch.rows))):
        fitting = [
            [g for g in groups if batch.work.tokens[list(pack)].sum() <= len(g) * problem.tokens_per_rank]
            for pack in packs
        ]
        for order in permutations(range(len(packs))):
            for chosen in product(*(fitting[i] for i in order)):
                for wave in waves(chosen):
                    yield Assignment(
                        wave=np.array(wave, dtype=np.int32),
                        rank_offsets=offsets_of([len(group) for group in chosen]),
                        ranks=np.concatenate([np.array(group, dtype=np.int32) for group in chosen]),
                        member_offsets=offsets_of([len(packs[i]) for i in order]),
                        members=np.concatenate([np.array(packs[i]) for i in order]),
                    )


def waves(groups: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield every numbering of waves in which no rank is in a wave twice."""
    for begins in product((False, True), repeat=len(groups) - 1):
        wave = np.cumsum([0, *begins]).tolist()
        used = [(number, rank) for number, group in zip(wave, groups, strict=True) for rank in group]
        if len(set(used)) == len(used):
            yield wave


@pytest.mark.lengthy
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_waves_of_a_tiny_step_are_quicker_than_its_plan(data: st.DataObject) -> None:
    num_ranks, most = data.draw(st.sampled_from([(2, 4), (3, 3)]), label="ranks and sequences")
    per_node = data.draw(st.integers(1, num_ranks), label="ranks per node")
    lengths = data.draw(st.lists(st.integers(1, 2 * 4096), min_size=1, max_size=most), label="lengths")
    problem = a_problem("microbatch", num_ranks=num_ranks, ranks_per_node=per_node)
    batches = one_batch(lengths, problem)
    batch = batches.batch(0)

    exact, found = (
        makespan_seconds(answer, batch, problem)
        for answer in (assign_tiny(batch, problem), make_solver(batches).assign(batch))
    )

    best = min(makespan_seconds(schedule, batch, problem) for schedule in schedules(batch, problem))
    assert exact == pytest.approx(best, rel=1e-9)
    assert found <= best * (1 + 1e-9)


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_equal_sequences_on_uneven_nodes_are_planned_exactly(sync: Sync) -> None:
    problem = a_problem(sync, num_ranks=4, ranks_per_node=3, alpha1="1.0e-10")

    step = planned([3000] * 5, problem)

    # The search for larger steps takes 1.52 s: two of the five would have to share a ring inside the node of three.
    assert step.makespan_seconds == pytest.approx(1.306, abs=1e-3)
