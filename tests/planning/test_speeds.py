"""Ranks of different speeds get different work: whole, within the rules of a plan, never beaten by their bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli import Planner
from fcp_cli.errors import UsageError
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, batch_of
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.speeds import read_rank_speeds
from tests.messages import raises
from tests.planning.examples import PROFILE, example_problem, long_tail, table_of

SYNCS: list[Sync] = ["iteration", "microbatch"]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_slow_rank_gets_less_and_the_step_ends_sooner_than_without_knowing(sync: Sync) -> None:
    problem = example_problem(sync)
    real = replace(problem, rank_speeds=tuple(0.7 if rank == 5 else 1.0 for rank in range(16)))
    batch = batch_of(long_tail(), problem)
    blind = assemble(solver_of(problem).assign(batch), batch, real)
    known = assemble(solver_of(real).assign(batch), batch, real)
    alike = assemble(solver_of(problem).assign(batch), batch, problem)
    assert blind.makespan_seconds > 1.3 * alike.makespan_seconds
    assert known.makespan_seconds < 1.1 * alike.makespan_seconds
    assert known.bound_seconds > alike.bound_seconds


@pytest.mark.parametrize("sync", SYNCS)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=50),
    speeds=st.lists(st.sampled_from([0.3, 0.7, 0.9, 1.0, 1.0, 1.0, 1.4]), min_size=6, max_size=6),
)
def test_whatever_the_speeds_a_plan_is_whole_and_above_its_bound(
    sync: Sync, lengths: list[int], speeds: list[float]
) -> None:
    problem = replace(example_problem(sync, num_ranks=6), rank_speeds=tuple(speeds))
    batch = batch_of(table_of(lengths), problem)
    step = assemble(solver_of(problem).assign(batch), batch, problem)  # refuses what breaks the rules of a plan
    assert sorted(step.sequences.tolist()) == list(range(len(lengths)))
    assert step.bound_seconds <= step.makespan_seconds * (1 + 1e-9)


def test_the_plan_states_the_speeds_and_is_checked_by_them(tmp_path: Path) -> None:
    speeds = read_rank_speeds("node1=0.5,2=0.9", num_ranks=16, ranks_per_node=4)
    problem = replace(example_problem(), rank_speeds=speeds)
    path = tmp_path / "plan.parquet"
    inputs = PlanInputs(table=long_tail(60), problem=problem, settings=BatchSettings(global_batch_size=63))
    make_plan(path, inputs, workers=1)
    assert PlanReader(path).metadata.rank_speeds == {"2": 0.9, "4": 0.5, "5": 0.5, "6": 0.5, "7": 0.5}
    assert not list(check_plan(path, manifest=inputs.table))


def test_a_plan_that_was_priced_as_if_ranks_were_alike_is_found(tmp_path: Path) -> None:
    problem = example_problem()
    slow = replace(problem, rank_speeds=(0.5,) * 16)
    batches = GlobalBatches(long_tail(60), problem, BatchSettings(global_batch_size=63))
    batch = batches.batch(0)
    even = solver_of(problem).assign(batch)
    assert assemble(even, batch, slow).makespan_seconds == pytest.approx(
        2 * assemble(even, batch, problem).makespan_seconds
    )


def test_a_program_names_its_slow_ranks(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE, encoding="utf-8")
    settings = {"ranks": 4, "ranks_per_node": 4, "tokens_per_rank": 16384, "sync": "iteration"}
    planner = Planner(tmp_path / "profile.yaml", **settings, rank_speeds={1: 0.5})  # type: ignore[arg-type]
    step = planner.plan(np.full(64, 4000))
    busy = step.busy_seconds(4)
    packs = [sum(len(pack) for pack in step.packs_of(rank)) for rank in range(4)]
    assert busy[1] == pytest.approx(busy[0], rel=0.2)
    assert packs[1] < 0.7 * packs[0]


def test_speeds_come_as_words_as_a_list_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text("{1: 0.7, node1: 0.9}", encoding="utf-8")
    assert read_rank_speeds(str(file), num_ranks=4, ranks_per_node=2) == (1.0, 0.7, 0.9, 0.9)
    assert read_rank_speeds("0-1=0.5", num_ranks=4, ranks_per_node=2) == (0.5, 0.5, 1.0, 1.0)
    assert read_rank_speeds("1, 1, 0.7, 1", num_ranks=4, ranks_per_node=2) == (1.0, 1.0, 0.7, 1.0)
    assert read_rank_speeds("1,1,1,1", num_ranks=4, ranks_per_node=2) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1,1", "--rank-speeds has 2 speeds for 4 ranks; it takes one speed per rank, as 1,1,0.7,1; or"),
        ("4=0.5", "--rank-speeds names 4 of a job of 4 ranks, which count from 0"),
        ("node2=0.5", "--rank-speeds names node 2 of a job of 2 nodes, which count from 0"),
        ("0=0", "--rank-speeds says 0 of 0; a speed is a number from 0.01 to 100, and 1 is as the cost profile says"),
        ("0=fast", "--rank-speeds says fast of 0; a speed is a number from 0.01 to 100"),
        ("host=1", "--rank-speeds names 'host'; it takes one speed per rank"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_speeds_that_no_job_has_are_one_line(given: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_rank_speeds(given, num_ranks=4, ranks_per_node=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_on_groups_do_not_go_with_speeds() -> None:
    problem = replace(example_problem(), rank_speeds=(0.5,) * 16)
    with raises(
        "UsageError: --rank-speeds changes which ranks are in rings, which --max-groups and --max-peers limit; use one of them"
    ):
        solver_of(problem, max_peers=8)
