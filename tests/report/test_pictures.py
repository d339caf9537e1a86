from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.report.charts import DegreeColours, inline_csv
from fcp_cli.report.page_data import HeatMap, PlanPicture, RunPicture, bars_of, evenly_spaced, measured_bars
from fcp_cli.report.plan_tables import RanksShown
from fcp_cli.runs.metrics_reader import run_step
from tests.planning.examples import example_problem, long_tail
from tests.report.runs import SLOW_FACTOR, SLOW_RANK, busy_seconds, make_example_plan, measured

EVERY_RANK = RanksShown(num_ranks=8, ranks_per_node=4)


@pytest.fixture(scope="module", params=["iteration", "microbatch"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlanReader:
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path, sync=request.param)
    return PlanReader(path)


@pytest.fixture(scope="module")
def picture(reader: PlanReader) -> PlanPicture:
    picture = PlanPicture(metadata=reader.metadata)
    for step in reader.steps():
        picture.compare(step)
        picture.add(step)
    return picture


@pytest.fixture(scope="module")
def run(reader: PlanReader) -> RunPicture:
    run = RunPicture(plan=reader.metadata, chosen=frozenset({1}))
    for step in reader.steps():
        run.add(run_step(measured(step, 8)))
    return run


def area(bars: dict[str, np.ndarray]) -> float:
    return float(((bars["top"] - bars["rank"]) * (bars["end"] - bars["start"])).sum())


def test_the_bars_of_a_step_cover_its_busy_time(reader: PlanReader) -> None:
    for step in reader.steps():
        bars = {name: np.asarray(column) for name, column in bars_of(step, EVERY_RANK).items()}
        assert area(bars) == pytest.approx(step.busy_seconds(8).sum())
        assert bars["end"].max() == pytest.approx(step.makespan_seconds)


def test_the_bars_of_pipelines_show_every_forward_and_backward_of_every_stage(tmp_path: Path) -> None:
    problem = replace(
        example_problem(num_ranks=8, tokens_per_rank=16_384),
        pipeline_parallel=4,
        pipeline=Pipeline(forward_share=1 / 3, head_share=0.1),
    )
    inputs = PlanInputs(table=long_tail(40), problem=problem, settings=BatchSettings(global_batch_size=43))
    result = make_plan(tmp_path / "pipelines.parquet", inputs)
    step = next(PlanReader(tmp_path / "pipelines.parquet").steps())
    bars = {name: np.asarray(column) for name, column in bars_of(step, EVERY_RANK, result.metadata).items()}
    assert len(bars["order"]) == 2 * 4 * step.degrees[~step.is_idle].sum()
    assert area(bars) == pytest.approx(step.busy_seconds(8).sum())
    assert bars["end"].max() == pytest.approx(step.makespan_seconds)
    assert result.summary.bubble_fraction == pytest.approx(1 - step.busy_seconds(8).max() / step.makespan_seconds)


def test_measured_bars_cover_every_working_rank(reader: PlanReader) -> None:
    step = next(reader.steps())
    bars = {name: np.asarray(column) for name, column in measured_bars(run_step(measured(step, 8)), EVERY_RANK).items()}
    planned = bars_of(step, EVERY_RANK)
    assert sorted(zip(bars["order"].tolist(), bars["rank"].tolist(), strict=True)) == sorted(
        zip(np.asarray(planned["order"]).tolist(), np.asarray(planned["rank"]).tolist(), strict=True)
    )


def test_the_heat_map_holds_the_idle_share_of_every_cell(picture: PlanPicture, reader: PlanReader) -> None:
    cells = {name: np.asarray(column) for name, column in picture.heat.cells().items()}
    assert len(cells["idle"]) == 4 * 8
    for step in reader.steps():
        idle = 1 - step.busy_seconds(8) / step.makespan_seconds
        assert cells["idle"][cells["step"] == step.step] == pytest.approx(idle)


@pytest.mark.parametrize(("steps", "num_ranks"), [(1, 1), (126, 65), (1000, 64), (1009, 1024)])
def test_heat_map_cells_tile_all_steps_and_ranks(steps: int, num_ranks: int) -> None:
    heat = HeatMap(steps=steps, num_ranks=num_ranks)
    for step in range(steps):
        heat.add(step, np.full(num_ranks, 0.25))
    cells = {name: np.asarray(column) for name, column in heat.cells().items()}
    sizes = (cells["step_end"] - cells["step"]) * (cells["rank_end"] - cells["rank"])
    assert sizes.sum() == steps * num_ranks
    assert cells["idle"] == pytest.approx(0.25)


def test_the_histogram_counts_every_sequence_once(picture: PlanPicture) -> None:
    bars = {name: np.asarray(column) for name, column in picture.length_bars().items()}
    assert bars["sequences"].sum() == picture.summary.sequences == 203
    assert bars["top"] - bars["bottom"] == pytest.approx(bars["sequences"])
    assert bars["longest"].max() >= 100_000


def test_no_rank_holds_more_than_the_budget(picture: PlanPicture) -> None:
    peaks = np.asarray(picture.peak_bars()["most"])
    assert 0 < peaks.max() <= picture.metadata.tokens_per_rank


def test_the_worst_steps_can_be_chosen(picture: PlanPicture, reader: PlanReader) -> None:
    steps = list(reader.steps())
    slowest, widest = (step.step for step in picture.worst_steps())
    assert slowest == max(steps, key=lambda step: step.makespan_seconds).step
    assert widest == max(steps, key=lambda step: step.gap).step
    assert {slowest, widest} <= picture.chosen_steps().keys()


def test_a_large_plan_is_sampled(reader: PlanReader) -> None:
    values = {name: getattr(reader.metadata, name) for name in PlanMetadata.__dataclass_fields__}
    large = PlanPicture(metadata=PlanMetadata(**{**values, "steps": 10_000, "num_ranks": 1024}))
    read = [step for step in range(10_000) if large.wants(step)]
    assert large.every == 6
    assert len(read) == 1667


def test_evenly_spaced_keeps_both_ends() -> None:
    assert evenly_spaced(3, 10) == [0, 1, 2]
    assert evenly_spaced(1000, 4) == [0, 333, 666, 999]


def test_points_are_of_a_groups_slowest_member(run: RunPicture, reader: PlanReader) -> None:
    points = run.scatter()
    ratio = np.asarray(points["measured"]) / np.asarray(points["planned"])
    assert set(np.round(ratio, 9).tolist()) == {1.0, SLOW_FACTOR}
    slow = sum(SLOW_RANK in row.ranks and not row.is_idle for step in reader.steps(1) for row in step.microbatches())
    assert np.count_nonzero(ratio > 1.25) == slow


def test_warm_up_counts_in_no_figure(run: RunPicture, reader: PlanReader) -> None:
    assert (run.steps, run.warm_up_steps) == (4, 1)
    steps = list(reader.steps(1))
    seconds = [step.makespan_seconds * SLOW_FACTOR + 0.25 for step in steps]
    assert run.totals()["ratio"] == pytest.approx(sum(seconds) / sum(step.makespan_seconds for step in steps))
    assert np.asarray(run.step_times()["step"]).tolist() == [1, 2, 3]


def test_rates_and_idle_time_are_over_the_measured_seconds(run: RunPicture, reader: PlanReader) -> None:
    steps = [measured(step, 8) for step in reader.steps(1)]
    seconds = sum(step["seconds"] for step in steps)
    computed = sum(timing["seconds"] for step in steps for rank in step["ranks"] for timing in rank["micro_batches"])
    totals = run.totals()
    assert totals["idle"] == pytest.approx(1.0 - computed / (8 * seconds))
    assert totals["tokens_per_second"] == pytest.approx(sum(step["tokens"] for step in steps) / seconds)
    assert totals["step_seconds"] == pytest.approx(np.mean([step["seconds"] for step in steps]))


def test_planned_figures_beside_measured_ones_are_the_same_statistics_of_the_same_steps(
    run: RunPicture, reader: PlanReader
) -> None:
    steps, totals = list(reader.steps(1)), run.totals()
    planned = sum(step.makespan_seconds for step in steps)
    assert totals["predicted_step_seconds"] == pytest.approx(planned / len(steps))
    assert totals["predicted_slowest_seconds"] == pytest.approx(max(step.makespan_seconds for step in steps))
    assert totals["predicted_idle"] == pytest.approx(
        1 - sum(step.busy_seconds(8).sum() for step in steps) / 8 / planned
    )


def test_measured_idle_time_has_a_map_of_its_own(run: RunPicture, reader: PlanReader) -> None:
    cells = {name: np.asarray(column) for name, column in run.heat.cells().items()}
    assert set(cells["step"].tolist()) == {1, 2, 3}, "warm-up steps are excluded"
    step = measured(next(reader.steps(2)), 8)
    idle = 1 - np.array(busy_seconds(step)) / step["seconds"]
    assert cells["idle"][cells["step"] == 2] == pytest.approx(idle)


def test_a_large_job_is_drawn_by_whole_nodes_with_ticks_of_ranks_that_exist() -> None:
    shown = RanksShown.of(16_384, 8)
    ranks = np.arange(16_384)[shown.are_shown(np.arange(16_384))]
    assert len(ranks) == shown.count == 512
    assert shown.rows(ranks).tolist() == list(range(512)), "nodes stand side by side"
    assert ranks[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 256]
    assert "512 of 16,384 ranks are drawn" in shown.in_words()


@pytest.mark.parametrize(("num_ranks", "per_node"), [(1, 1), (4, 4), (12, 6), (64, 8), (1000, 8)])
def test_rank_axes_have_few_ticks_and_none_beyond_the_last_rank(num_ranks: int, per_node: int) -> None:
    shown = RanksShown.of(num_ranks, per_node)
    ticks = shown.axis(8)["values"]
    assert 1 <= len(ticks) <= 8
    assert min(ticks) > 0 and max(ticks) < shown.count


def test_few_degrees_have_a_colour_each() -> None:
    assert DegreeColours([3, 1, 8]).domain == ["1", "3", "8"]


def test_many_degrees_share_colours_by_range() -> None:
    colours = DegreeColours(range(1, 101))
    assert colours.domain == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-100"]
    assert colours.with_labels({"degree": np.array([4, 5, 100])})["colour"] == ["3-4", "5-8", "65-100"]


def test_tables_travel_as_csv() -> None:
    table = inline_csv({"step": np.array([1, 2]), "share": np.array([0.123456789, 1.0]), "what": ["a", "b"]})
    assert table["values"] == "step,share,what\n1,0.12346,a\n2,1,b\n"
    assert table["format"] == {"type": "csv", "parse": {"step": "number", "share": "number"}}


def test_commas_quotes_and_line_breaks_stay_in_their_cell() -> None:
    texts = ["1,024", 'a "ring"', "two\nlines"]
    table = inline_csv({"step": np.array([1, 2, 3]), "what, and why": texts})
    assert list(csv.reader(io.StringIO(table["values"]))) == [
        ["step", "what, and why"],
        *(list(row) for row in zip("123", texts, strict=True)),
    ]
