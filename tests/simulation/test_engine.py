from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata import Sync
from fcp_cli.simulation.engine import simulate_step
from tests.simulation.plans import Row, jobs, make_step, planned_makespan

Job = tuple[list[Row], int, Sync]


@given(jobs())
def test_without_noise_the_simulated_makespan_is_the_planned_one(job: Job) -> None:
    rows, num_ranks, sync = job
    timeline = simulate_step(make_step(rows), num_ranks=num_ranks, sync=sync)
    assert timeline.makespan_seconds == pytest.approx(planned_makespan(rows, num_ranks, sync), rel=1e-12)


@given(jobs())
def test_as_many_cores_as_ranks_change_nothing(job: Job) -> None:
    rows, num_ranks, sync = job
    alone = simulate_step(make_step(rows), num_ranks=num_ranks, sync=sync)
    shared = simulate_step(make_step(rows), num_ranks=num_ranks, sync=sync, cores=num_ranks)
    np.testing.assert_array_equal(alone.end_seconds, shared.end_seconds)


@given(jobs(), st.integers(1, 4), st.integers(0, 2**31))
def test_a_rank_runs_its_rows_in_order_and_never_two_at_once(job: Job, cores: int, seed: int) -> None:
    rows, num_ranks, sync = job
    noise = np.random.default_rng(seed).lognormal(size=len(rows))
    step = make_step(rows)
    timeline = simulate_step(step, num_ranks=num_ranks, sync=sync, seconds=step.seconds * noise, cores=cores)
    last_end = dict.fromkeys(range(num_ranks), 0.0)
    for span in timeline.spans():
        assert span.arrival_seconds == last_end[span.rank]
        assert span.arrival_seconds <= span.start_seconds <= span.end_seconds
        last_end[span.rank] = span.end_seconds


@given(jobs())
def test_waves_never_overlap(job: Job) -> None:
    rows, num_ranks, _ = job
    rows = [row._replace(wave=max(row.wave, 0)) for row in rows]
    step = make_step(rows)
    timeline = simulate_step(step, num_ranks=num_ranks, sync="microbatch")
    for wave in range(1, int(step.wave.max()) + 1):
        assert timeline.start_seconds[step.wave == wave].min() >= timeline.end_seconds[step.wave == wave - 1].max()


@given(jobs(), st.integers(1, 5))
def test_processor_sharing_conserves_work(job: Job, cores: int) -> None:
    rows, num_ranks, sync = job
    timeline = simulate_step(make_step(rows), num_ranks=num_ranks, sync=sync, cores=cores)
    # Integrate the speed of every rank over the pieces of time between events.
    times = np.unique(np.concatenate([timeline.start_seconds, timeline.end_seconds]))
    done = np.zeros(len(rows))
    for begin, end in pairwise(times):
        runs = (timeline.start_seconds <= begin) & (timeline.end_seconds >= end)
        computing = sum(len(row.ranks) for row, running in zip(rows, runs, strict=True) if running)
        done[runs] += (end - begin) * min(1.0, cores / max(computing, 1))
    np.testing.assert_allclose(done, [row.seconds for row in rows], rtol=1e-9, atol=1e-9)


def test_four_ranks_on_two_cores_take_twice_as_long_while_all_compute() -> None:
    rows = [Row([0], 1.0), Row([1], 1.0), Row([2], 1.0), Row([3], 2.0)]
    timeline = simulate_step(make_step(rows), num_ranks=4, sync="iteration", cores=2)
    # All four share two cores until 2 s; rank 3 has one second of work left and then a core of its own.
    assert timeline.end_seconds.tolist() == [2.0, 2.0, 2.0, 3.0]


def test_waiting_is_what_is_left_of_the_step() -> None:
    rows = [Row([0, 1], 2.0), Row([0], 3.0), Row([2], 1.0), Row([1, 2], 1.0)]
    timeline = simulate_step(make_step(rows), num_ranks=4, sync="iteration")
    assert timeline.makespan_seconds == 5.0
    assert timeline.busy_seconds().tolist() == [5.0, 3.0, 2.0, 0.0]
    assert timeline.waiting_seconds().tolist() == [0.0, 2.0, 3.0, 5.0]
    assert timeline.idle_fraction == 0.5
    assert [span.waiting_seconds for span in timeline.spans() if span.rank == 2] == [0.0, 1.0]


def test_a_rank_waits_for_the_wave_under_microbatch_only() -> None:
    rows = [Row([0], 1.0, 0), Row([1], 3.0, 0), Row([0], 3.0, 1), Row([1], 1.0, 1)]
    waves = simulate_step(make_step(rows), num_ranks=2, sync="microbatch")
    free = simulate_step(make_step(rows), num_ranks=2, sync="iteration")
    assert (waves.makespan_seconds, free.makespan_seconds) == (6.0, 4.0)


def test_a_step_whose_rows_do_not_follow_its_waves_is_rejected() -> None:
    rows = [Row([0], 1.0, 1), Row([0], 1.0, 0)]
    with pytest.raises(PlanError, match=r"step 7 cannot be executed: a rank's rows do not follow its waves"):
        simulate_step(make_step(rows, step=7), num_ranks=1, sync="microbatch")
