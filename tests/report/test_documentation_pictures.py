"""`make pictures` still works: its data, its plans, and charts that Vega draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import picture
from fcp_cli.cli.paced import library_table, typical_step
from fcp_cli.plan.step import StepPlan

pytest.importorskip("vl_convert", reason="pictures need the extra 'report'")

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def plans() -> dict[str, list[StepPlan]]:
    """Two steps of Python's own library, the best static plan and ours."""
    library = library_table()
    return {name: picture.planned(library, name, steps=2) for name in (picture.STATIC, picture.FCP)}


def test_every_machine_has_the_standard_library_to_plan_for() -> None:
    lengths = library_table().length_tokens
    assert len(lengths) > 200
    assert lengths.min() > 0 and lengths.max() > 50_000


def test_both_plans_hold_the_same_sequences(plans: dict[str, list[StepPlan]]) -> None:
    for static, ours in zip(plans[picture.STATIC], plans[picture.FCP], strict=True):
        assert np.array_equal(np.sort(static.sequences), np.sort(ours.sequences))
        assert static.makespan_seconds >= ours.makespan_seconds


def test_the_step_shown_gains_what_its_plan_gains(plans: dict[str, list[StepPlan]]) -> None:
    gains = [
        static.makespan_seconds / ours.makespan_seconds
        for static, ours in zip(plans[picture.STATIC], plans[picture.FCP], strict=True)
    ]
    step_seconds = [[step.makespan_seconds for step in steps] for steps in plans.values()]
    seconds = list(map(sum, step_seconds))
    distances = [abs(gain - seconds[0] / seconds[1]) for gain in gains]
    assert typical_step(*step_seconds) == distances.index(min(distances))


def test_vega_draws_every_picture(plans: dict[str, list[StepPlan]]) -> None:
    curves = {"iteration": [(8, 1.0), (16, 2.0)], "microbatch": [(8, 1.5), (16, 4.0)]}
    for spec, words in (
        (picture.gantt_spec(plans), ["static, degree ", "fcp: ", "bound"]),
        (picture.idle_spec(plans), ["idle ", "rank"]),
        (picture.degrees_spec({"library": plans[picture.FCP]}), ["share of rank-seconds", "library"]),
        (picture.growth_spec({"milliseconds": (curves, True), "gap": (curves, False)}), ["iteration", "gap"]),
    ):
        drawn = picture.svg(spec)
        assert all(word in drawn for word in words)
        assert "NaN" not in drawn and "undefined" not in drawn


def test_pictures_in_the_docs_are_light_and_need_nothing_from_elsewhere() -> None:
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    drawn = {"degrees.svg", "idle.svg", "paced.svg", "planner-growth.svg", "split-heads.svg", "step.svg", "words.svg"}
    assert {path.name for path in pictures} == drawn | {"study-extreme.svg", "study-scaling.svg", "study-speedups.svg"}
    for path in pictures:
        text = path.read_text()
        assert len(text) < 200_000
        assert "<script" not in text and "<image" not in text and "@import" not in text
