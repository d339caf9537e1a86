"""The loop over named candidates: what is tried, which answer is kept, and whose it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp_solver import solver_of, winner_of
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs
from fcp_cli.planning.problem import Assignment
from fcp_cli.planning.searches import CLOSE_ENOUGH, Candidate, Found, assign_waves, best_of
from tests.planning.examples import compile_planner, example_problem, long_tail

ROOT = Path(__file__).parents[2]
_NONE, _NO_RANKS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
_ANSWER = Assignment(wave=_NO_RANKS, rank_offsets=_NONE, ranks=_NO_RANKS, member_offsets=_NONE, members=_NONE)


class Tried:
    """Candidates that note that they were tried; the price of an answer is a hundredth of its first wave."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, seconds: float | None, above_gap: float | None = None) -> Candidate:
        def assign(found: Found) -> Assignment | None:
            self.names.append(name)
            return None if seconds is None else replace(_ANSWER, wave=np.array([100 * seconds], dtype=np.int32))

        return Candidate(name, assign, above_gap)

    @staticmethod
    def price(assignment: Assignment) -> float:
        return float(assignment.wave[0]) / 100


def test_optional_candidates_are_tried_only_above_their_gap() -> None:
    tried = Tried()
    found = best_of(
        [
            tried("always", 10.06),
            tried("above half a percent", 10.04, CLOSE_ENOUGH),
            tried("not any more", 1.0, CLOSE_ENOUGH),
            tried("above the bound", 10.0, 0.0),
            tried("at the bound", 9.0, 0.0),
            tried("always, too", 11.0),
            tried("without an answer", None),
        ],
        tried.price,
        lambda: 10.0,
    )
    assert tried.names == ["always", "above half a percent", "above the bound", "always, too", "without an answer"]
    assert (found.seconds, found.name) == (10.0, "above the bound")


def test_on_ties_the_first_answer_is_kept_and_no_bound_is_computed_for_nothing() -> None:
    def bound() -> float:
        raise AssertionError("no candidate is optional")

    tried = Tried()
    assert best_of([tried("first", 3.0), tried("second", 3.0)], tried.price, bound).name == "first"


def test_the_solver_says_which_candidate_gave_its_answer() -> None:
    compile_planner()
    problem = example_problem(sync="microbatch")
    found = solver_of(problem).best(batch_of(long_tail(), problem))
    assert found.assignment is not None
    assert found.name.startswith("waves") or found.name in {
        "regrouped",
        "0.8 of the token budget",
        "0.5 of the token budget",
        "one degree",
        "exact",
    }


def test_pairs_of_waves_planned_again_may_end_the_step_sooner() -> None:
    compile_planner()
    problem = example_problem(sync="microbatch", tokens_per_rank=8192)
    batch = batch_of(long_tail(), problem)
    order, sequences = by_falling_work(batch.work)
    waves = assign_waves(order, sequences, planner_inputs(problem))
    assert waves is not None
    found = solver_of(problem).best(batch)
    assert found.name == "regrouped"
    assert found.seconds < makespan_seconds(waves, batch, problem)


@pytest.mark.parametrize(
    "place",
    sorted(
        set(
            re.findall(
                r"`([\w/]+\.py::\w+)`", (ROOT / "docs" / "explanation" / "planner.md").read_text(encoding="utf-8")
            )
        )
    ),
)
def test_every_phase_on_the_page_is_a_function_of_that_name(place: str) -> None:
    file, name = place.split("::")
    text = (ROOT / "fcp_cli" / file).read_text(encoding="utf-8")
    assert re.search(rf"^\s*(def|class) {name}\b", text, flags=re.M), place


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_the_winner_of_a_planned_step_is_named_and_nobody_of_a_step_that_was_changed(sync: Sync) -> None:
    problem = example_problem(sync)
    batch = batch_of(long_tail(60), problem)
    solver = solver_of(problem)
    step = assemble(solver.assign(batch), batch, problem)
    assert winner_of(step, problem, {}) == solver.best(batch).name
    assert winner_of(replace(step, makespan_seconds=1.01 * step.makespan_seconds), problem, {}) is None
    assert winner_of(step, problem, {"max_groups": 4}) is None
