from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.profile import StepTerms
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import list_schedule, step_times
from fcp_cli.util.arrays import FloatArray
from tests.plan.steps import Row, jobs, make_step, planned_makespan


def offsets(groups: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate(([0], np.cumsum([len(group) for group in groups]))).astype(np.int64)


def test_a_microbatch_starts_when_the_last_of_its_ranks_is_free() -> None:
    groups = [[0], [1], [0, 1], [2], [1]]
    starts = list_schedule(
        offsets(groups),
        np.array(list(chain.from_iterable(groups)), dtype=np.int32),
        np.array([3.0, 5.0, 2.0, 1.0, 4.0]),
        num_ranks=3,
    )
    assert starts.tolist() == [0.0, 0.0, 5.0, 0.0, 7.0]


def waves_of(seconds: list[float], terms: StepTerms, encoder: list[float] | None = None) -> tuple[list[float], float]:
    """Starts and end of three waves, of two ranks each but for the second."""
    groups = [[0], [1], [0, 1], [0], [1]]
    start, makespan, _stuck = step_times(
        "microbatch",
        wave=np.array([0, 0, 1, 2, 2], dtype=np.int32),
        rank_offsets=offsets(groups),
        ranks=np.array(list(chain.from_iterable(groups)), dtype=np.int32),
        seconds=np.array(seconds),
        num_ranks=2,
        terms=terms,
        encoder_seconds=None if encoder is None else np.array(encoder),
    )
    return start.tolist(), makespan


def test_a_wave_starts_when_the_slowest_of_the_wave_before_has_ended() -> None:
    assert waves_of([1.0, 3.0, 2.0, 4.0, 1.0], StepTerms()) == ([0.0, 0.0, 3.0, 5.0, 5.0], 9.0)


def test_no_wave_is_shorter_than_what_its_weights_take_to_gather() -> None:
    terms = StepTerms(wave_floor_seconds=2.5, tail_seconds=100.0, update_seconds=0.5)
    assert waves_of([1.0, 3.0, 2.0, 4.0, 1.0], terms) == ([0.0, 0.0, 3.0, 5.5, 5.5], 10.0)


def test_in_lockstep_a_wave_takes_the_slowest_encoder_and_then_the_slowest_rest() -> None:
    seconds, encoder = [3.0, 3.0, 2.0, 4.0, 1.0], [2.0, 0.5, 1.0, 0.0, 1.0]
    assert waves_of(seconds, StepTerms(lockstep=True), encoder) == ([0.0, 0.0, 4.5, 6.5, 6.5], 11.5)
    assert waves_of(seconds, StepTerms(), encoder) == ([0.0, 0.0, 3.0, 5.0, 5.0], 9.0)


def test_a_step_without_waves_ends_with_its_gradients_and_its_update() -> None:
    rows = [Row([0], 1.0, -1), Row([1], 3.0, -1)]
    step, terms = make_step(rows), StepTerms(wave_floor_seconds=100.0, tail_seconds=0.25, update_seconds=0.5)
    _start, makespan, _stuck = step_times(
        "iteration",
        wave=step.wave,
        rank_offsets=step.rank_offsets,
        ranks=step.ranks,
        seconds=step.seconds,
        num_ranks=2,
        terms=terms,
    )
    assert makespan == 3.75


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 6), min_size=1), st.floats(0, 10)),
        min_size=1,
        max_size=25,
    )
)
def test_no_rank_runs_two_microbatches_at_once_and_none_waits_without_reason(
    microbatches: list[tuple[set[int], float]],
) -> None:
    groups = [sorted(group) for group, _ in microbatches]
    seconds = np.array([duration for _, duration in microbatches])
    starts = list_schedule(
        offsets(groups), np.array(list(chain.from_iterable(groups)), dtype=np.int32), seconds, num_ranks=7
    )
    ends = starts + seconds
    for i, group in enumerate(groups):
        earlier_ends = [ends[j] for j in range(i) if set(groups[j]) & set(group)]
        assert starts[i] == max(earlier_ends, default=0.0)


def starts_of(rows: list[Row], num_ranks: int, sync: Sync) -> FloatArray:
    step = make_step(rows)
    return step_times(
        sync,
        wave=step.wave,
        rank_offsets=step.rank_offsets,
        ranks=step.ranks,
        seconds=step.seconds,
        num_ranks=num_ranks,
    ).start_seconds


@given(jobs())
def test_the_last_end_is_the_makespan_that_the_definition_gives(job: tuple[list[Row], int, Sync]) -> None:
    rows, num_ranks, sync = job
    ends = starts_of(rows, num_ranks, sync) + make_step(rows).seconds
    assert ends.max() == pytest.approx(planned_makespan(rows, num_ranks, sync), rel=1e-12)


@given(jobs())
def test_waves_never_overlap(job: tuple[list[Row], int, Sync]) -> None:
    rows, num_ranks, _ = job
    rows = sorted((row._replace(wave=max(row.wave, 0)) for row in rows), key=lambda row: row.wave)
    step, start = make_step(rows), starts_of(rows, num_ranks, "microbatch")
    for wave in range(1, int(step.wave.max()) + 1):
        assert start[step.wave == wave].min() >= (start + step.seconds)[step.wave == wave - 1].max()


def test_a_rank_waits_for_the_wave_under_microbatch_only() -> None:
    rows = [Row([0], 1.0, 0), Row([1], 3.0, 0), Row([0], 3.0, 1), Row([1], 1.0, 1)]
    ends = [(starts_of(rows, 2, sync) + make_step(rows).seconds).max() for sync in ("microbatch", "iteration")]
    assert ends == [6.0, 4.0]
