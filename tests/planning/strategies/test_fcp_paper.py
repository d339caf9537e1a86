from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.strategies.fcp_paper import cut_waves, make_solver
from tests.planning.examples import example_problem, first_step, long_tail, one_batch

SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")


def test_sequences_that_fit_no_wave_together_get_waves_of_their_own() -> None:
    problem = example_problem("microbatch", num_ranks=4, ranks_per_node=4, tokens_per_rank=1000)
    # Each needs 3 of the 4 ranks: by tokens two waves would do, by ranks it takes three.
    step = first_step(one_batch([2100, 2100, 2100], problem), make_solver)
    assert step.wave.max() == 2


def test_the_long_sequence_of_a_wave_gets_the_ranks_that_short_ones_can_spare() -> None:
    problem = example_problem("microbatch", num_ranks=8, ranks_per_node=8)
    step = first_step(one_batch([60_000, 2_000, 2_000], problem), make_solver)
    degrees = {max(row.lengths): row.degree for row in step.microbatches() if not row.is_idle}
    assert degrees[60_000] >= 6


@pytest.mark.parametrize("cut", ["arrival", "sorted", "balanced"])
def test_one_setting_alone_is_never_quicker_than_the_best_of_all(cut: str) -> None:
    problem = example_problem("microbatch")
    batches = GlobalBatches(long_tail(), problem, BatchSettings(global_batch_size=100))
    batch = batches.batch(0)
    alone = make_solver(batches, cuts=[cut], wave_counts=1).assign(batch)
    fewest = -(-int(batch.work.tokens.sum()) // (problem.num_ranks * problem.tokens_per_rank))
    assert alone.wave.max() + 1 >= fewest
    best = make_solver(batches).assign(batch)
    assert makespan_seconds(alone, batch, problem) >= makespan_seconds(best, batch, problem)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 10_000), min_size=1, max_size=40),
    waves=st.integers(1, 10),
    cut=st.sampled_from(["arrival", "sorted", "balanced"]),
)
def test_every_cut_keeps_its_rule(lengths: list[int], waves: int, cut: str) -> None:
    tokens = np.array(lengths, dtype=np.int64)
    wave_of = cut_waves(cut, tokens, waves)
    assert wave_of.min() >= 0
    assert wave_of.max() < waves
    if cut == "arrival":
        assert (np.diff(wave_of) >= 0).all()
    if cut == "sorted":
        assert (np.diff(wave_of[np.argsort(-tokens, kind="stable")]) >= 0).all()
    if cut == "balanced":
        load = np.bincount(wave_of, weights=tokens, minlength=waves)
        assert load.max() - load.min() <= tokens.max()
