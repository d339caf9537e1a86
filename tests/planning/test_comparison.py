from __future__ import annotations

from dataclasses import replace

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.compare import Contender, Outcome, compare
from tests.planning.examples import example_problem, long_tail, table_of

SETTINGS = BatchSettings(global_batch_size=50, step_limit=2)


def compared(*names: str) -> dict[str, Contender]:
    problem = example_problem(num_ranks=8, ranks_per_node=4)
    return {one.name: one for one in compare(long_tail(97), problem, SETTINGS, names=names, milp_seconds=0.01)}


def test_flexsp_keeps_its_microbatches_under_either_sync() -> None:
    outcomes = compared("flexsp")["flexsp"].outcomes
    assert outcomes["iteration"].step_seconds <= outcomes["microbatch"].step_seconds
    assert outcomes["iteration"].distinct_groups == outcomes["microbatch"].distinct_groups


def test_the_best_outcome_is_the_one_with_the_shorter_steps() -> None:
    contender = compared("bytescale")["bytescale"]
    assert contender.best is min(contender.outcomes.values(), key=lambda outcome: outcome.step_seconds)


def test_of_equally_quick_syncs_the_best_is_iteration_as_in_the_recipes_of_a_plan() -> None:
    waves = compared("fcp")["fcp"].outcomes["microbatch"]
    other = replace(waves, sync="iteration")
    both: tuple[dict[Sync, Outcome], ...] = (
        {"microbatch": waves, "iteration": other},
        {"iteration": other, "microbatch": waves},
    )
    for outcomes in both:
        assert Contender(name="fcp", outcomes=outcomes).best is other


def test_steps_are_counted_as_they_are_planned() -> None:
    seen: list[str] = []
    problem = example_problem(num_ranks=8, ranks_per_node=4)
    list(compare(long_tail(97), problem, SETTINGS, names=["static"], milp_seconds=1.0, on_step=seen.append))
    assert seen == ["static"] * 4  # two steps under each of two syncs


def test_a_refusal_stands_in_for_outcomes() -> None:
    problem = example_problem(num_ranks=6, ranks_per_node=6, tokens_per_rank=1000)
    settings = BatchSettings(global_batch_size=1)
    (contender,) = compare(table_of([5500]), problem, settings, names=["megatron-dynamic-cp"], milp_seconds=1.0)
    assert contender.best is None and contender.outcomes == {}
    assert contender.refusal.startswith("megatron-dynamic-cp cannot plan a sequence of 5500 tokens")
