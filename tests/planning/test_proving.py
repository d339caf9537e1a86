"""What a plan states beyond its rows is computed again: each falsehood below has rows and a hash that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.compare_families import profile_with_heads
from fcp_cli.cli.app import app
from fcp_cli.cost.profile import Memory, dump_cost_profile, parse_cost_profile
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.proving import prove_again, unproven
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.solvers import solver_names, strategy
from tests.plan.plans import Columns, rewritten, small_plan
from tests.planning.examples import example_problem, long_tail

TABLE = long_tail(60)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return small_plan(tmp_path / "plan.parquet")


def found(plan: Path) -> list[str]:
    broken = list(check_plan(plan, manifest=TABLE))
    return [str(one) for one in broken or prove_again(plan, TABLE)]


def bounds(change: Callable[[float, float], float]) -> Callable[[Columns], None]:
    def edit(columns: Columns) -> None:
        stated = zip(columns["step_bound_seconds"], columns["step_seconds"], strict=True)
        columns["step_bound_seconds"] = [change(bound, makespan) for bound, makespan in stated]

    return edit


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_plan_just_made_is_proven_again(tmp_path: Path, sync: Sync) -> None:
    assert found(small_plan(tmp_path / "plan.parquet", sync)) == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda bound, makespan: makespan, id="proved optimal"),
        pytest.param(lambda bound, makespan: min(1.2 * bound, makespan), id="20 percent more"),
        pytest.param(lambda bound, makespan: bound / 2, id="halved"),
        pytest.param(lambda bound, makespan: 1e-12, id="next to nothing"),
    ],
)
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_bound_that_is_not_the_proven_one_is_found(
    tmp_path: Path, sync: Sync, change: Callable[[float, float], float]
) -> None:
    edited = rewritten(small_plan(tmp_path / "plan.parquet", sync), edit=bounds(change))
    assert "s are proven" in found(edited)[0]


def test_steps_that_were_exchanged_are_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        first, second = ([row for row, step in enumerate(columns["step"]) if step == number] for number in (0, 1))
        order = [*second, *first, *range(len(first) + len(second), len(columns["step"]))]
        steps = [0] * len(second) + [1] * len(first)
        for name, values in columns.items():
            columns[name] = [values[row] for row in order]
        columns["step"][: len(steps)] = steps

    assert found(rewritten(plan, edit=edit)) == ["step 0: its 20 sequences are not those of seed 0"]


@pytest.mark.parametrize("stated", ["fcp", "static", "packing", "deepspeed-ulysses"])
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_the_name_of_another_solver_is_found(tmp_path: Path, sync: Sync, stated: str) -> None:
    message, *_ = found(rewritten(small_plan(tmp_path / "plan.parquet", sync), solver=stated))
    assert f"its solver {stated} " in message


@pytest.mark.parametrize("name", [name for name in solver_names() if name not in {"flexsp", "fcp-paper"}])
def test_the_plan_of_a_solver_is_proven_to_be_its_own(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"max_groups": 4} if name == "fcp" else {}
    attention = strategy(name).attention
    problem = example_problem(tokens_per_rank=8192)
    if attention is not None:
        profile = parse_cost_profile(dump_cost_profile(profile_with_heads()), name="profile")
        problem = replace(problem, profile=profile, attention=attention)
    made = PlanInputs(
        table=TABLE,
        problem=problem,
        settings=BatchSettings(global_batch_size=20),
        request=PlanRequest(solver=name, **options),
    )
    plan = tmp_path / "plan.parquet"
    assert make_plan(plan, made).metadata.solver == name
    assert unproven(PlanReader(plan).metadata, TABLE) == {}
    assert found(plan) == []
    if options:
        loose = rewritten(plan, solver_options={"max_groups": 400})
        assert "its solver fcp plans" in found(loose)[0]


def of_memory(plan: Path, **memory: float) -> str:
    """The plan's cost profile with a memory block."""
    profile = parse_cost_profile(PlanReader(plan).metadata.cost_profile, name="profile")
    return dump_cost_profile(replace(profile, memory=Memory(bytes_per_token=1000.0, **memory)))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"seed": 7}, "its 20 sequences are not those of seed 7"),
        ({"shuffle": False}, "its 20 sequences are not those of the manifest's order"),
        ({"solver": "magic"}, "its solver is magic; installed are fcp, "),
        ({"solver_options": {"max_groups": 1}}, "distinct groups, its metadata states at most 1 (max_groups)"),
        ({"solver_options": {"max_degree": 1}}, "ranks in a ring, its metadata states at most 1 (max_degree)"),
    ],
)
def test_a_setting_that_did_not_make_the_plan_is_found(plan: Path, stated: dict[str, Any], message: str) -> None:
    assert message in found(rewritten(plan, **stated))[0]


@pytest.mark.parametrize(
    ("state", "capacity", "message"),
    [
        (1e6, 1e6 + 8192e3, None),
        (1e6, 1e6 + 8191e3, "its token budget is 8,192, but a rank of its cost profile holds 8,191"),
        (2e6, 1e6, "the model takes 0.002 of the 0.001 GB that its cost profile states"),
    ],
)
def test_a_budget_beyond_the_memory_of_the_cost_profile_is_found(
    plan: Path, state: float, capacity: float, message: str | None
) -> None:
    edited = rewritten(plan, cost_profile=of_memory(plan, model_state_bytes=state, capacity_bytes=capacity))
    assert found(edited) == ([] if message is None else [message])


def said(plan: Path, *options: str) -> str:
    shown = CliRunner().invoke(app, ["check", str(plan), *options])
    assert shown.exit_code == 0
    return shown.stdout


def test_a_bound_that_cannot_be_proven_here_is_said_not_to_be(plan: Path) -> None:
    assert "bounds proven again" in said(plan)
    assert "batches and solver not proven again: name the manifest" in said(plan)
    older = said(rewritten(plan, fcp_version="0.0.1", edit=bounds(lambda bound, _: bound / 2)))
    assert "bounds and solver not proven again: fcp 0.0.1 made the plan" in older
    assert ", bounds proven again" not in older


def test_a_plan_of_forward_passes_may_hold_more_tokens_than_training(plan: Path) -> None:
    profile = parse_cost_profile(of_memory(plan, model_state_bytes=1e6, capacity_bytes=2e6), name="profile")
    forward = dump_cost_profile(replace(profile, phase="forward"))
    assert found(rewritten(plan, cost_profile=forward, phase="forward")) == []
