from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.profiling.points import Point, Schedule, measurement_points
from fcp_cli.profiling.samples import (
    Measurement,
    append_line,
    begin_samples,
    measured_points,
    read_measurement,
    read_samples,
)
from tests.messages import raises

POINT = Point(lengths=(512, 64), degree=2)


def _file(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    measurement = _measurement(tmp_path)
    begin_samples(measurement)
    for line in lines:
        append_line(measurement.samples, line)
    return measurement.samples


def _measurement(tmp_path: Path) -> Measurement:
    return Measurement(
        model="qwen3-tiny",
        cluster="this-machine",
        ranks=2,
        degrees=(1, 2),
        max_length=1024,
        device="cpu",
        recipe=Recipe(precision="fp32"),
        sync="iteration",
        layers=(1, 2),
        budget_seconds=3.0,
        samples=tmp_path / "samples.jsonl",
    )


def _observation(point: Point, layers: int, *seconds: float) -> dict[str, Any]:
    return {"kind": "observation", "point": point.key, "layers": layers, "seconds": list(seconds)}


def test_observations_of_a_point_become_their_lowest_decile(tmp_path: Path) -> None:
    path = _file(tmp_path, _observation(POINT, 2, 1.0, 9.0), _observation(POINT, 2, 1.1, 1.2, 1.3))
    (found,) = measured_points(read_samples(path), [POINT], layers=(2,), model_layers=2)
    assert 1.0 <= found.seconds <= 1.1
    assert found.repeats == 5
    assert found.sample().degree == 2


def test_ranks_that_share_cores_take_turns_and_their_median_counts(tmp_path: Path) -> None:
    environment = {"kind": "environment", "shares_cores": True}
    path = _file(tmp_path, environment, _observation(POINT, 2, 1.0, 2.0, 2.2), _observation(POINT, 2, 2.4, 9.0))
    (found,) = measured_points(read_samples(path), [POINT], layers=(2,), model_layers=2)
    assert found.seconds == 2.2


def test_accelerators_are_summed_up_by_medians_since_their_quickest_clocks_do_not_last(tmp_path: Path) -> None:
    environment = {"kind": "environment", "device": "cuda"}
    path = _file(tmp_path, environment, _observation(POINT, 2, 1.0, 2.0, 2.2), _observation(POINT, 2, 2.4, 9.0))
    (found,) = measured_points(read_samples(path), [POINT], layers=(2,), model_layers=2)
    assert found.seconds == 2.2


def test_two_layer_counts_are_extrapolated_to_the_whole_model(tmp_path: Path) -> None:
    path = _file(tmp_path, _observation(POINT, 2, 1.0), _observation(POINT, 6, 2.0))
    (found,) = measured_points(read_samples(path), [POINT], layers=(2, 6), model_layers=36)
    assert found.seconds == pytest.approx(1.0 + 34 * 0.25)


def test_points_that_were_not_observed_are_left_out(tmp_path: Path) -> None:
    path = _file(tmp_path, _observation(POINT, 2, 1.0))
    assert measured_points(read_samples(path), [POINT], layers=(2, 6), model_layers=36) == []


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = _file(tmp_path, _observation(POINT, 2, 1.0))
    with path.open("a") as file:
        file.write('{"kind": "observation", "po')
    samples = read_samples(path)
    assert len(samples.of_kind("observation")) == 1
    assert not samples.finished


def test_a_file_of_another_kind_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"format": "fcp-metrics/1"}\n')
    with raises(
        snapshot(
            "ProfileError: FOLDER/metrics.jsonl is the metrics of a run, not the samples of a measurement; 'fcp report PLAN --metrics FOLDER/metrics.jsonl' draws them"
        )
    ):
        read_samples(path)


def test_points_cover_lengths_and_packs_and_hold_others_out() -> None:
    points = measurement_points(4096, (1, 2))
    fitted = {point.lengths for point in points if not point.held_out}
    held_out = {point.lengths for point in points if point.held_out}
    assert not fitted & held_out
    assert {(64,), (512,), (4096,), (64,) * 8} <= fitted
    assert {point.degree for point in points} == {1, 2}
    assert all(point.tokens <= 4096 for point in points)
    assert len({point.key for point in points}) == len(points)
    assert measurement_points(4096, (1, 2)) == points


def test_a_longest_pack_that_is_too_short_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"--max-length is 100; it must be at least 512"):
        measurement_points(100, (1,))


def test_a_schedule_observes_everything_before_anything_twice() -> None:
    points = measurement_points(1024, (1, 2))
    schedule = Schedule(points, (2,))
    seen = []
    for _ in points:
        position = schedule.next(1e9)
        assert position is not None
        seen.append(position)
        schedule.add(position, [1.0])
    assert sorted(seen) == list(range(len(points)))


def test_a_schedule_ends_when_all_observations_are_tight() -> None:
    schedule = Schedule([POINT], (2,))
    rounds = 0
    while (position := schedule.next(1e9)) is not None:
        schedule.add(position, [1.0])
        rounds += 1
    assert rounds == Schedule.LEAST_REPEATS


def test_a_schedule_repeats_what_lies_apart_up_to_a_limit() -> None:
    schedule = Schedule([POINT], (2,))
    rounds = 0
    while (position := schedule.next(1e9)) is not None:
        schedule.add(position, [1.0 + rounds % 7])
        rounds += 1
    assert rounds == Schedule.MOST_REPEATS


def test_a_schedule_leaves_out_what_the_budget_cannot_pay() -> None:
    cheap, dear = Point(lengths=(64,), degree=1), Point(lengths=(65536,), degree=1)
    schedule = Schedule([cheap, dear], (2,))
    schedule.add(0, [1.0])
    assert schedule.next(30.0) == 0
    assert schedule.next(1e9) == 1


def test_a_resumed_schedule_goes_on_with_what_is_missing() -> None:
    other = Point(lengths=(64,), degree=1)
    schedule = Schedule([POINT, other], (2,))
    schedule.resume({(2, POINT.key): [1.0] * 5})
    assert schedule.next(1e9) == 1


def test_a_request_survives_its_file(tmp_path: Path) -> None:
    request = _measurement(tmp_path)
    request.write(tmp_path / "request.json")
    assert read_measurement(tmp_path / "request.json") == request


HEADERS: dict[str, dict[str, Any]] = {
    "a degree of 0": {"degrees": [1, 0]},
    "a misspelt key": {"rank": 2},
    "no layers": {"layers": None},
    "another format": {"format": "fcp-samples/9"},
}
HEADERS_MESSAGES = snapshot(
    {
        "a degree of 0": "ProfileError: FOLDER/samples.jsonl, first line: degrees[1] is 0; it must be a whole number of at least 1; remove it, or give another -o",
        "a misspelt key": "ProfileError: FOLDER/samples.jsonl, first line: unknown key rank; did you mean ranks? remove it, or give another -o",
        "no layers": "ProfileError: FOLDER/samples.jsonl, first line: layers is None; it must be a list; remove it, or give another -o",
        "another format": "ProfileError: FOLDER/samples.jsonl holds no samples of 'fcp profile' (fcp-samples/1); remove it, or give another -o",
    }
)


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_first_line_is_named(tmp_path: Path, case: str) -> None:
    path = _file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **HEADERS[case]}) + "\n")
    with raises(HEADERS_MESSAGES[case]):
        read_samples(path)


def test_a_damaged_observation_is_named_by_its_line(tmp_path: Path) -> None:
    path = _file(tmp_path, _observation(POINT, 2, 1.0), _observation(POINT, 2, 1.0, -1.0))
    with pytest.raises(ProfileError, match=r"samples.jsonl, line 3: seconds\[1\] is -1.0; it must be a non-negative"):
        read_samples(path)
