"""What a step takes under effects that its prediction leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.disturbances import EFFECTS, LAUNCH_SECONDS, Execution, execution_of, step_seconds
from benchmarks.workloads import family_table
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.solvers import make_solver
from tests.planning.examples import example_problem


def an_execution(groups: list[list[int]], *, ring: list[float], waves: bool = False, other: float = 1.0) -> Execution:
    """Micro-batches of `other` seconds and rings that nothing hides, two ranks a node."""
    count = len(groups)
    return Execution(
        waves=waves,
        num_ranks=8,
        ranks_per_node=2,
        wave=np.zeros(count, dtype=np.int32),
        rank_offsets=np.cumsum([0, *map(len, groups)]),
        ranks=np.concatenate([np.array(group, dtype=np.int32) for group in groups]),
        encoder=np.zeros(count),
        other=np.full(count, other),
        attention=np.zeros(count),
        hidden=np.array(ring),
        exposed=np.zeros(len(ring)),
    )


def test_rings_that_cross_on_one_node_share_its_link_and_others_do_not() -> None:
    apart = an_execution([[0, 1, 2, 3], [4, 5, 6, 7]], ring=[2.0, 2.0], waves=True)
    assert step_seconds(apart, shared_links=True) == step_seconds(apart) == 3.0
    meet = an_execution([[0, 1, 2], [3, 4, 5]], ring=[2.0, 2.0], waves=True)
    assert step_seconds(meet) == 3.0
    assert step_seconds(meet, shared_links=True) == 5.0
    inside = an_execution([[0, 1], [2, 3]], ring=[2.0, 2.0], waves=True)
    assert step_seconds(inside, shared_links=True) == 3.0


def test_a_ring_has_its_link_to_itself_again_when_the_other_has_ended() -> None:
    meet = an_execution([[0, 1, 2], [3, 4, 5]], ring=[2.0, 1.0])
    # Both at half speed: the second ends after 1 + 2 s, when the first is through with 3 of its 1 + 4 s, and goes on
    # with two fifths of 1 + 2 s.
    assert step_seconds(meet, shared_links=True) == pytest.approx(3.0 + 0.4 * 3.0)


def test_ranks_wait_for_all_of_a_ring_also_where_links_are_shared() -> None:
    queued = an_execution([[0], [0, 1, 2], [1], [4, 5]], ring=[0.0, 2.0, 0.0, 1.0])
    assert step_seconds(queued, shared_links=True) == pytest.approx(step_seconds(queued)) == 5.0


def test_floor_encoder_and_closing_are_those_of_the_step() -> None:
    waves = replace(
        an_execution([[0], [1]], ring=[0.0, 0.0], waves=True),
        wave=np.array([0, 1], dtype=np.int32),
        encoder=np.array([0.0, 4.0]),
        floor_seconds=3.0,
        closing_seconds=0.5,
    )
    assert step_seconds(waves) == 3.0 + 5.0 + 0.5


def test_effects_slow_what_they_say() -> None:
    alone = an_execution([[rank] for rank in range(8)], ring=[0.0] * 8)
    found = {name: effect(alone) for name, effect in EFFECTS.items()}
    assert found["slow rank"] == pytest.approx(1.2)
    assert found["shared link"] == found["launches"] == 1.0
    assert 1.02 < found["noise"] < 1.15
    rings = an_execution([[0, 1, 2, 3]], ring=[0.0])
    assert EFFECTS["launches"](rings) == pytest.approx(1.0 + 4 * LAUNCH_SECONDS)


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_without_an_effect_a_step_takes_what_was_predicted(sync: Sync) -> None:
    problem = example_problem(sync, num_ranks=64, ranks_per_node=8)
    table = family_table("github", sequences=512, seed=0)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))
    batch = batches.batch(0)
    for name in ("fcp", "static"):
        answer = make_solver(name, batches).assign(batch)
        predicted = makespan_seconds(answer, batch, problem)
        assert step_seconds(execution_of(answer, batch, problem)) == pytest.approx(predicted, rel=1e-12)
