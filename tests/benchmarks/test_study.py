"""`python -m benchmarks.study`: its baseline, its claims about strategies, and a small part of it from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vl_convert", reason="pictures need the extra 'report'")

from benchmarks.study.__main__ import main, write
from benchmarks.study.baseline import StandardPacking, best_standard_packing, packs_by_arrival
from benchmarks.study.page import fill
from benchmarks.study.parts import QUICK, Scope, Study, grid_settings, run_study
from benchmarks.study.published import CLAIMS, FCP_CLUSTER
from benchmarks.study.runs import OURS, SPLIT, STANDARD, STATIC, STRATEGIES, SYNCS, ULYSSES, batches_of, run_cell
from benchmarks.study.workload import Setting, extreme_table
from benchmarks.workloads import MAX_LENGTH
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble

DOCS = Path(__file__).parents[2] / "docs"
SETTING = Setting(model="qwen3-8b", dataset="extreme", cluster=FCP_CLUSTER, encoder="text", ranks=16, batch_size=60)
LENGTHS = st.lists(st.one_of(st.integers(1, 4000), st.integers(1, MAX_LENGTH)), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def study() -> Study:
    """One step of one text and one vision model."""
    return run_study(replace(QUICK, vision_models=("qwen3-vl-2b",)), say=lambda what: None)


@given(lengths=LENGTHS)
def test_standard_packing_keeps_the_order_and_opens_a_pack_only_where_it_must(lengths: list[int]) -> None:
    tokens = np.array(lengths)
    pack_of = packs_by_arrival(tokens)
    assert pack_of[0] == 0 and set(np.diff(pack_of)) <= {0, 1}
    held = np.bincount(pack_of, weights=tokens)
    assert held.max() <= MAX_LENGTH
    firsts = np.searchsorted(pack_of, np.arange(1, len(held)))
    assert (held[:-1] + tokens[firsts] > MAX_LENGTH).all()


@settings(max_examples=20)
@given(lengths=LENGTHS, sync=st.sampled_from(SYNCS))
def test_standard_packing_is_a_valid_plan_of_one_degree_that_holds_128k_tokens(lengths: list[int], sync: Sync) -> None:
    table = LengthTable(name="lengths", length_tokens=np.array(lengths, dtype=np.int64))
    batches = batches_of(SETTING, table, sync, steps=1)
    batch = batches.batch(0)
    solver = best_standard_packing(batches.problem, [batch])
    assert solver is not None
    step = assemble(solver.assign(batch), batch, batches.problem)
    assert {row.degree for row in step.microbatches() if not row.is_idle} == {solver.degree}
    assert solver.degree * SETTING.tokens_per_rank >= MAX_LENGTH


@pytest.mark.parametrize("sync", SYNCS)
def test_no_other_degree_that_holds_128k_tokens_is_quicker(sync: Sync) -> None:
    batches = batches_of(SETTING, extreme_table(59, seed=0), sync, steps=1)
    batch = batches.batch(0)
    seconds = {
        degree: assemble(
            StandardPacking(problem=batches.problem, degree=degree).assign(batch), batch, batches.problem
        ).makespan_seconds
        for degree in (8, 16)
    }
    best = best_standard_packing(batches.problem, [batch])
    assert best is not None and best.degree == min(seconds, key=lambda degree: seconds[degree])


def test_groups_of_the_ulysses_baseline_split_heads_alone() -> None:
    batches = batches_of(SETTING, extreme_table(59, seed=0), "microbatch", steps=1, attention="ulysses")
    batch = batches.batch(0)
    solver = best_standard_packing(batches.problem, [batch])
    assert solver is not None
    step = assemble(solver.assign(batch), batch, batches.problem)
    assert {row.ring_degree for row in step.microbatches() if not row.is_idle} == {1}


def test_a_model_whose_heads_no_degree_for_128k_tokens_divides_has_no_ulysses_baseline() -> None:
    setting = replace(SETTING, model="internvl3-2b")  # 12 heads, on 16 ranks of which 8 at least hold 128k tokens
    batches = batches_of(setting, extreme_table(59, seed=0), "microbatch", steps=1, attention="ulysses")
    assert best_standard_packing(batches.problem, [batches.batch(0)]) is None


@pytest.mark.lengthy
def test_no_strategy_beats_the_bound_and_none_is_flattered(study: Study) -> None:
    for cell in (*study.grid, *(cell for _, cell in study.variants), *study.scaling):
        planned = {name for name, _ in cell.outcomes}
        assert set(cell.outcomes) == {(name, sync) for name in planned for sync in SYNCS}
        assert planned >= {*STRATEGIES} - {ULYSSES}
        for outcome in cell.outcomes.values():
            assert outcome.gap > -1e-9


@pytest.mark.lengthy
def test_ours_is_never_slower_than_a_static_baseline_by_more_than_its_own_tolerance(study: Study) -> None:
    """Static schedules are tried where ours lies more than 1 % (above 32 ranks: 3 %) over the bound."""
    for cell in (*study.grid, *(cell for _, cell in study.variants), *study.scaling):
        for over in (STANDARD, STATIC):
            for speedup in cell.speedups(over=over):
                assert speedup >= (1 / 1.01 if cell.setting.ranks <= 32 else 1 / 1.03)
    for extreme in study.extremes:
        assert min(extreme.speedups(over=STANDARD)) >= 1.0


@pytest.mark.lengthy
def test_splitting_heads_where_it_takes_less_is_not_slower_than_rings_alone(study: Study) -> None:
    for cell in (*study.grid, *study.scaling):
        assert min(cell.speedups(of=SPLIT, over=OURS)) >= 1 / 1.01


@pytest.mark.lengthy
def test_a_plan_that_knows_the_encoder_is_not_slower_than_one_that_does_not(study: Study) -> None:
    for gain in study.gains:
        assert 0 < gain.encoder_share < 1
        assert min(gain.gains.values()) >= 1 / 1.03


@pytest.mark.lengthy
def test_a_frozen_encoder_is_a_smaller_share_of_the_work(study: Study) -> None:
    trained, frozen = (
        {gain.setting.dataset: gain.encoder_share for gain in study.gains if gain.setting.encoder == encoder}
        for encoder in ("trained", "frozen")
    )
    assert trained.keys() == frozen.keys() == {"msrvtt", "internvid", "openvid", "mixed"}
    assert all(frozen[name] < trained[name] for name in trained)


@pytest.mark.lengthy
def test_cells_are_the_same_whenever_they_are_planned(study: Study) -> None:
    short = QUICK.short_counts[0]
    setting = replace(SETTING, ranks=64, batch_size=short + 1)
    cell = run_cell(setting, extreme_table(short, seed=0), steps=1)
    assert cell.outcomes[OURS, "iteration"].step_seconds == study.extremes[0].seconds[OURS, "iteration"]


@pytest.mark.lengthy
def test_the_page_and_its_pictures_are_written(study: Study, tmp_path: Path) -> None:
    write(study, tmp_path)
    page = (tmp_path / "research" / "study.md").read_text()
    assert page.count("| msrvtt | qwen3-vl-2b |") == 2  # trained and frozen
    assert "| github | qwen3-1.7b |" in page
    assert "nan" not in page.lower().split() and "inf" not in page.lower().split()
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["study-extreme.svg", "study-scaling.svg", "study-speedups.svg"]
    for path in pictures:
        drawn = path.read_text()
        assert "NaN" not in drawn and "undefined" not in drawn
    assert fill(page, study) == page


@pytest.mark.lengthy
def test_a_page_without_a_place_for_a_table_is_refused(study: Study) -> None:
    page = (DOCS / "research" / "study.md").read_text().replace("<!-- end gains -->", "")
    with pytest.raises(ValueError, match="no marks '<!-- begin gains -->' and '<!-- end gains -->'"):
        fill(page, study)


def test_a_quick_study_does_not_replace_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quick"])
    assert "--to FOLDER" in capsys.readouterr().err


def test_the_documentation_shows_the_whole_study() -> None:
    page = (DOCS / "research" / "study.md").read_text()
    for setting in grid_settings(Scope()):
        assert f"| {setting.dataset} | {setting.model} | " in page
    cells = page.partition("## Every cell")[2]
    rows = [line for line in cells.splitlines() if line.startswith("| ") and "| model |" not in line]
    assert len(rows) == len(list(grid_settings(Scope()))) == 108


def test_bars_named_by_the_papers_are_bars_of_this_study() -> None:
    known = {(one.cluster, one.encoder, one.model, one.dataset) for one in grid_settings(Scope())}
    for (cluster, encoder), claim in CLAIMS.items():
        for (model, dataset), speedup in claim.bars.items():
            assert (cluster, encoder, model, dataset) in known
            assert claim.lowest <= speedup <= claim.highest
