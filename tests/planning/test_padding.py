"""Plans for rings of equal chunks: padding counts in the token budget and in the times, and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.model import group_seconds, sequence_work
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import crosses_nodes
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings, settings_of
from fcp_cli.planning.continuation import remaining_steps
from fcp_cli.planning.make_plan import make_plan, plan_step
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem, problem_of
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.solvers import make_solver, solver_names, works_under
from tests.plan.plans import rewritten
from tests.planning.examples import example_problem, example_profile, long_tail, one_batch

SYNCS = pytest.mark.parametrize("sync", ["iteration", "microbatch"])
TABLE = long_tail(60)


def padded_problem(sync: Sync, *, num_ranks: int, ranks_per_node: int, budget: int, multiple: int) -> Problem:
    return example_problem(
        sync,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tokens_per_rank=budget // multiple * multiple,
        padding_multiple=multiple,
    )


def planned(lengths: list[int], problem: Problem, solver: str = "fcp", *, max_groups: int | None = None) -> StepPlan:
    batches = one_batch(lengths, problem)
    return plan_step(batches.batch(0), problem, make_solver(solver, batches, max_groups=max_groups))


def require_padding_counted(step: StepPlan, problem: Problem, lengths: list[int]) -> None:
    """Each rule, worked out anew from the rows of a step."""
    assert problem.padding_multiple is not None
    assert sorted(step.sequences.tolist()) == list(range(len(lengths)))
    assert step.lengths.tolist() == [lengths[row] for row in step.sequences.tolist()], "lengths stay the manifest's"
    crosses = crosses_nodes(step.rank_offsets, step.ranks, problem.ranks_per_node)
    for row in step.microbatches():
        if row.is_idle:
            continue
        unit = row.degree * problem.padding_multiple
        padded = np.array([-(-length // unit) * unit for length in row.lengths])
        assert padded.sum() <= row.degree * problem.tokens_per_rank
        work = sequence_work(LengthTable(name="padded", length_tokens=padded), problem.profile)
        seconds = group_seconds(
            problem.profile,
            work.packed(np.zeros(1, dtype=np.int64)),
            degree=row.degree,
            crosses_nodes=crosses[row.order],
        )
        assert row.seconds == pytest.approx(float(seconds[0]), rel=1e-9)
    assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9)


@SYNCS
@settings(max_examples=60)
@given(data=st.data())
def test_no_pack_exceeds_the_budget_with_padding_and_times_are_those_of_padded_lengths(
    sync: Sync, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 24), label="num_ranks")
    multiple = data.draw(st.sampled_from([2, 4, 16]), label="multiple")
    problem = padded_problem(
        sync,
        num_ranks=num_ranks,
        ranks_per_node=data.draw(st.integers(1, 9), label="ranks_per_node"),
        budget=data.draw(st.sampled_from([17, 64, 1000, 8192]), label="budget"),
        multiple=multiple,
    )
    budget = problem.tokens_per_rank
    any_length = st.one_of(st.integers(1, budget), st.integers(1, budget * num_ranks))
    lengths = data.draw(st.lists(any_length, min_size=1, max_size=40), label="lengths")
    require_padding_counted(planned(lengths, problem), problem, lengths)


@pytest.mark.lengthy
@SYNCS
@pytest.mark.parametrize("solver", [name for name in solver_names() if works_under(name, example_profile())])
def test_every_strategy_counts_padding_alike(sync: Sync, solver: str) -> None:
    problem = padded_problem(sync, num_ranks=4, ranks_per_node=2, budget=200, multiple=8)
    generator = np.random.default_rng(7)
    for _ in range(1 if solver == "flexsp" else 5):
        lengths = [790, 401, *generator.integers(1, 200, 5 if solver == "flexsp" else 30).tolist()]
        require_padding_counted(planned(lengths, problem, solver), problem, lengths)


@SYNCS
def test_a_limit_on_groups_counts_padding(sync: Sync) -> None:
    problem = padded_problem(sync, num_ranks=8, ranks_per_node=4, budget=200, multiple=8)
    lengths = [1590, 401, 700, 333, *np.random.default_rng(3).integers(1, 200, 30).tolist()]
    require_padding_counted(planned(lengths, problem, max_groups=4), problem, lengths)


def padded_plan(path: Path, *, num_ranks: int = 16, **continued: Any) -> Path:
    make_plan(
        path,
        PlanInputs(
            table=TABLE,
            problem=padded_problem("iteration", num_ranks=num_ranks, ranks_per_node=4, budget=8192, multiple=4),
            settings=BatchSettings(global_batch_size=20, epochs=2),
            request=PlanRequest(solver="static"),
            **continued,
        ),
    )
    return path


def test_a_padded_plan_is_sound_and_says_what_it_is_padded_to(tmp_path: Path) -> None:
    plan = padded_plan(tmp_path / "plan.parquet")
    reader = PlanReader(plan)
    assert '"padding_multiple": 4' in reader.metadata.to_json()
    assert list(check_plan(plan, manifest=TABLE)) == []
    assert problem_of(reader.metadata, name="plan").padding_multiple == 4


def test_a_continued_padded_plan_stays_padded_and_is_sound(tmp_path: Path) -> None:
    first = PlanReader(padded_plan(tmp_path / "first.parquet"))
    rest = padded_plan(tmp_path / "rest.parquet", num_ranks=15, remaining=remaining_steps(first, 3))
    metadata = PlanReader(rest).metadata
    assert (metadata.padding_multiple, metadata.first_step) == (4, 3)
    assert settings_of(metadata) == settings_of(first.metadata)
    assert list(check_plan(rest, manifest=TABLE)) == []


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (None, "its cost profile gives"),
        (4096, "its cost profile gives"),
        (8192, "tokens, with padding, on"),
    ],
)
def test_another_padding_than_the_plan_was_made_with_is_found(tmp_path: Path, stated: int | None, message: str) -> None:
    plan = rewritten(padded_plan(tmp_path / "plan.parquet"), padding_multiple=stated)
    assert any(message in str(finding) for finding in check_plan(plan, manifest=TABLE))


def test_a_budget_that_padded_sequences_cannot_fill_is_a_defect() -> None:
    with pytest.raises(ValueError, match="no multiple of 4"):
        example_problem(tokens_per_rank=10, padding_multiple=4)
