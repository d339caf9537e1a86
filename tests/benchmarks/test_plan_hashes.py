"""Hashes of plans tell another plan from one with other seconds, and name what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_hashes import differences, limits, line_of
from fcp_cli.plan.step import StepPlan


@pytest.mark.lengthy
def test_the_same_code_plans_the_same_hashes_and_other_limits_plan_others() -> None:
    lines = [line_of(case) for case in limits()]
    assert lines == [line_of(case) for case in limits()]
    hashes = dict(line.split(": ") for line in lines)
    assert hashes["limits max-degree-1 iteration"] != hashes["limits max-groups-2 iteration"]


def test_a_difference_says_whether_the_plan_or_only_its_seconds_changed() -> None:
    name, steps = next(iter(limits()))
    assert not isinstance(steps, str)
    before = [line_of((name, steps)), "gone: 1 2"]
    (step,) = steps
    slower = line_of((name, [replace(step, seconds=step.seconds * 2.0)]))
    (seconds,) = differences(before[:1], [slower])
    assert seconds.startswith(f"{name}: another seconds: ")
    waves = line_of((name, [_in_one_wave(step)]))
    plan, gone = differences(before, [waves])[::-1]
    assert plan.startswith(f"{name}: another plan: ")
    assert gone == "gone: another plan: 1 2 -> missing"
    assert differences(before[:1], before[:1]) == []


def _in_one_wave(step: StepPlan) -> StepPlan:
    return replace(step, wave=step.wave * 0)
