from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fcp_cli.cost.profile import Bandwidth
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import problem_of
from fcp_cli.planning.settings import PlanInputs, resolve
from fcp_cli.report.plan_tables import step_seconds_with
from fcp_cli.report.why import Explanation, explain_degree
from fcp_cli.util.console import Assumptions
from tests.planning.examples import example_problem, long_tail
from tests.report.runs import make_example_plan


@pytest.fixture(scope="module", params=["iteration", "microbatch"])
def explanations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Explanation]:
    """Of every micro-batch of a plan on 16 ranks, 4 per node."""
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path, sync=request.param, num_ranks=16)
    reader = PlanReader(path)
    problem = problem_of(reader.metadata, name="plan")
    return [
        explain_degree(step, row.order, problem)
        for step in reader.steps()
        for row in step.microbatches()
        if not row.is_idle
    ]


def test_the_planned_degree_is_priced_as_the_plan_says(explanations: list[Explanation]) -> None:
    for explanation in explanations:
        own = next(a for a in explanation.alternatives if a.degree == explanation.microbatch.degree)
        assert own.seconds == pytest.approx(explanation.microbatch.seconds)
        assert own.fits


def test_neighbours_are_one_rank_away(explanations: list[Explanation]) -> None:
    for explanation in explanations:
        degree = explanation.microbatch.degree
        assert [a.degree for a in explanation.alternatives] == [
            d for d in (degree - 1, degree, degree + 1) if 1 <= d <= 16
        ]


def test_memory_is_named_exactly_where_one_rank_fewer_cannot_hold_the_pack(explanations: list[Explanation]) -> None:
    rings = [explanation for explanation in explanations if explanation.microbatch.degree > 1]
    assert rings
    for explanation in rings:
        fewer, reason = explanation.alternatives[0], explanation.reasons[0]
        assert (reason.bound == "memory") == (explanation.microbatch.tokens > 16384 * fewer.degree)
        assert reason.degree == fewer.degree


def test_a_single_rank_has_only_the_reason_against_more(explanations: list[Explanation]) -> None:
    singles = [explanation for explanation in explanations if explanation.microbatch.degree == 1]
    assert singles
    assert all([reason.degree for reason in explanation.reasons] == [2] for explanation in singles)


def test_leaving_the_node_is_named(explanations: list[Explanation]) -> None:
    whole_nodes = [e for e in explanations if e.microbatch.degree == 4 and not e.alternatives[1].crosses_nodes]
    assert all(e.reasons[-1].bound == "topology" for e in whole_nodes)
    assert all("leave the node" in e.reasons[-1].text for e in whole_nodes)


def test_a_ring_that_outlasts_attention_is_no_reason_against_one_rank_more_if_the_planned_one_does_too(
    tmp_path: Path,
) -> None:
    make_example_plan(tmp_path / "plan.parquet", num_ranks=16)
    reader = PlanReader(tmp_path / "plan.parquet")
    problem = problem_of(reader.metadata, name="plan")
    slow = replace(problem.profile, bandwidth=Bandwidth(intra_node=1e8, inter_node=1e8))
    found = [
        explain_degree(step, row.order, replace(problem, profile=slow))
        for step in reader.steps()
        for row in step.microbatches()
        if row.degree > 1
    ]
    own = [next(a for a in one.alternatives if a.degree == one.microbatch.degree) for one in found]
    assert any(a.ring_seconds > a.attention_seconds for a in own)
    for explanation, planned in zip(found, own, strict=True):
        if planned.ring_seconds > planned.attention_seconds:
            assert "would outlast" not in explanation.reasons[-1].text


def test_all_ranks_are_the_most(tmp_path: Path) -> None:
    make_example_plan(tmp_path / "plan.parquet", num_ranks=7)
    reader = PlanReader(tmp_path / "plan.parquet")
    problem = problem_of(reader.metadata, name="plan")
    widest = next(
        explain_degree(step, row.order, problem)
        for step in reader.steps()
        for row in step.microbatches()
        if row.degree == 7
    )
    assert (widest.reasons[-1].bound, widest.reasons[-1].text) == ("ranks", "there are only 7 ranks")


def test_a_group_that_ends_with_its_step_is_not_shown_to_end_before_it(explanations: list[Explanation]) -> None:
    against_more = [
        explanation.reasons[-1] for explanation in explanations if explanation.reasons[-1].bound == "balance"
    ]
    assert against_more
    assert not any("ends 0.000 s before" in reason.text for reason in against_more)


def test_all_seconds_are_those_of_the_slowest_rank(tmp_path: Path) -> None:
    make_example_plan(tmp_path / "plan.parquet", num_ranks=7)
    reader = PlanReader(tmp_path / "plan.parquet")
    problem, step = problem_of(reader.metadata, name="plan"), next(iter(reader.steps()))
    slow = replace(problem, rank_speeds=(0.5,) * 7)
    for quick, other in zip(*(explain_degree(step, 0, one).alternatives for one in (problem, slow)), strict=True):
        assert other.seconds == pytest.approx(2 * quick.seconds)
        assert other.split_seconds == pytest.approx({u: 2 * seconds for u, seconds in quick.split_seconds.items()})
        assert (other.attention_seconds, other.ring_seconds) == pytest.approx(
            (2 * quick.attention_seconds, 2 * quick.ring_seconds)
        )


def test_of_a_pipeline_the_whole_step_is_priced_and_the_way_through_its_stages_shown(tmp_path: Path) -> None:
    problem = replace(
        example_problem("microbatch", num_ranks=8),
        pipeline_parallel=2,
        pipeline=Pipeline(forward_share=1 / 3, virtual_stages=2),
    )
    inputs = PlanInputs(table=long_tail(40), problem=problem, settings=BatchSettings(global_batch_size=43))
    metadata = make_plan(tmp_path / "pipelines.parquet", inputs).metadata
    step = next(PlanReader(tmp_path / "pipelines.parquet").steps())
    problem = problem_of(metadata, name="plan")
    said: list[str] = []
    for row in step.microbatches():
        if row.is_idle:
            continue
        explanation = explain_degree(step, row.order, problem, metadata=metadata)
        said += [reason.text for reason in explanation.reasons]
        by_degree = {a.degree: a for a in explanation.alternatives}
        assert by_degree[row.degree].end_seconds == pytest.approx(step.makespan_seconds)
        slower = [a for a in explanation.alternatives if a.seconds > by_degree[row.degree].seconds]
        assert all(a.end_seconds >= step.makespan_seconds * (1 - 1e-9) for a in slower)
        assert explanation.stages is not None
        begun = (*explanation.stages.forward_seconds, *reversed(explanation.stages.backward_seconds))
        assert len(begun) == 2 * 4 and list(begun) == sorted(begun)
        assert explanation.stages.forward_seconds[0] == pytest.approx(row.start_seconds)
        assert begun[-1] < explanation.stages.end_seconds <= step.makespan_seconds * (1 + 1e-9)
    longest = int(step.seconds.argmax())
    twice = step_seconds_with(step, longest, 2 * float(step.seconds[longest]), metadata, pipeline_of(metadata))
    assert twice >= step.makespan_seconds + 0.5 * float(step.seconds[longest])
    assert any("the step would end" in text for text in said) and not any("ends with" in text for text in said)


def pipeline_of(metadata: PlanMetadata) -> Pipeline:
    assert metadata.pipeline is not None
    return metadata.pipeline


def test_a_rank_more_that_recomputes_less_may_cost_fewer_rank_seconds(tmp_path: Path) -> None:
    """With recomputation as needed, fewer tokens a rank take less time each."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(100_000 // k) for k in range(1, 513)))
    recipe = RecipeRequest(recompute="as-needed", zero="3")
    request = PlanRequest(manifest=lengths, model="qwen3-8b", global_batch_size=128, recipe=recipe)
    inputs = resolve(request, Assumptions())
    make_plan(tmp_path / "plan.parquet", inputs)
    reader = PlanReader(tmp_path / "plan.parquet")
    problem = problem_of(reader.metadata, name="plan")
    found = [
        explain_degree(step, row.order, problem)
        for step in reader.steps()
        for row in step.microbatches()
        if not row.is_idle and row.degree < 64
    ]
    fewer = [one.alternatives[-1].rank_seconds < one.alternatives[-2].rank_seconds for one in found]
    assert any(fewer)
    for one, is_fewer in zip(found, fewer, strict=True):
        if "rank-seconds" in (text := one.reasons[-1].text):
            assert ("fewer rank-seconds" in text) == is_fewer
            assert not re.search(r"-\d", text), text
