"""The page as a user gets it; its charts are compiled by Vega itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.report.charts import CONFIG
from fcp_cli.runs.metrics import evaluation_record
from tests.cli import planning_folder
from tests.patience import PATIENCE_SECONDS
from tests.planning.examples import example_problem, long_tail
from tests.report.edited_plans import change_column, edited
from tests.report.runs import make_example_plan, write_run

vl_convert = pytest.importorskip("vl_convert", reason="fcp report needs the extra 'report'")

PLAN_CHARTS = {"static", "ours", "steps", "gantt", "heat", "lengths", "memory", "mix"}
RUN_CHARTS = {"loss", "measured", "waited", "scatter"}


def fcp(*arguments: object) -> subprocess.CompletedProcess[str]:
    return planning_folder.fcp(*map(str, arguments), cwd=Path.cwd())


@pytest.fixture(scope="module")
def page(example_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a plan and a whole run."""
    folder = tmp_path_factory.mktemp("page")
    write_run(folder / "metrics.jsonl", example_plan)
    result = fcp("report", example_plan, "--metrics", folder, "-o", folder / "report.html")
    assert result.returncode == 0, result.stderr
    assert "4 of 4 steps" in result.stderr
    return (folder / "report.html").read_text()


def test_the_page_of_a_script_is_not_named_after_the_model_that_the_plan_assumed(
    example_plan: Path, tmp_path: Path
) -> None:
    lines = write_run(tmp_path / "metrics.jsonl", example_plan).read_text().replace('"model":"tiny"', '"model":null')
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert '"model":null' in lines
    fcp("report", example_plan, "--metrics", tmp_path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<title>{tmp_path.name} on 8 ranks</title>" in page
    assert "<h1>qwen3-8b" not in page


def charts_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="charts" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match
    specs = json.loads(match[1])["charts"]
    return {name.removeprefix("chart-"): spec for name, spec in specs.items()}


class References(HTMLParser):
    """Whatever a page would load from elsewhere, and the ids it has."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in {"src", "href", "srcset"} and value and not value.startswith(("#", "data:")):
                self.outside.append(value)


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    references = References()
    references.feed(page)
    assert references.outside == []
    assert len(page.encode()) < 3_000_000


def test_every_chart_has_its_place(page: str) -> None:
    references = References()
    references.feed(page)
    specs = charts_of(page)
    assert specs.keys() == PLAN_CHARTS | RUN_CHARTS
    assert {f"chart-{name}" for name in specs} <= references.ids


@pytest.mark.lengthy
@pytest.mark.parametrize("name", sorted(PLAN_CHARTS | RUN_CHARTS))
def test_vega_draws_every_chart(page: str, name: str) -> None:
    spec = {**charts_of(page)[name], "width": 600}
    svg = vl_convert.vegalite_to_svg(spec, config=CONFIG)
    assert svg.count("<path") > 3
    assert "NaN" not in svg and "undefined" not in svg


def test_planned_and_measured_figures_stand_side_by_side(page: str) -> None:
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', page)
    assert [row[0] for row in rows[:4]] == ["Mean step", "Slowest step", "Tokens per second", "Idle"]
    assert all(all(row) for row in rows[:4])
    assert re.search(r"<h2>[\d.]+x as fast as the best static degree</h2>", page)


def test_the_page_names_model_cluster_and_where_its_times_come_from_and_no_path(page: str) -> None:
    title = re.search(r"<title>(.*?)</title>", page)
    assert title and title[1] == "tiny on 8 ranks"
    assert "cost profile of qwen3-8b on example-8x8: assumed" in page
    assert "bound under this cost profile" in page
    assert "metrics.jsonl" not in page and "/tmp" not in page


def test_losses_of_held_out_rows_stand_beside_those_of_the_training(example_plan: Path, tmp_path: Path) -> None:
    evaluations = [evaluation_record(step, seconds=1.0, buckets=[(64, 10, 42.0)]) for step in (1, 3, 7)]
    run = write_run(tmp_path / "metrics.jsonl", example_plan)
    run.write_text(run.read_text() + "".join(json.dumps(one) + "\n" for one in evaluations))
    assert fcp("report", example_plan, "--metrics", tmp_path, "-o", tmp_path / "report.html").returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "rows that are not trained on, in 2 evaluations." in page, "the plan has no step 7"
    training, held_out = charts_of(page)["loss"]["layer"]
    assert len(training["data"]["values"].splitlines()) == 1 + 4
    assert held_out["data"]["values"] == "step,loss\n1,4.2\n3,4.2\n"
    spec = {**charts_of(page)["loss"], "width": 600}
    assert vl_convert.vegalite_to_svg(spec, config=CONFIG).count(">held out<") == 1


def test_the_plan_is_never_shown_quicker_than_its_bound(page: str) -> None:
    # The bound is one of all steps, and the columns are without the warm-up: a share alone holds for both.
    assert re.search(r"<dt>Above the bound under this cost profile</dt><dd>[\d.]+%</dd>", page)
    assert "<dt>Excluded from both columns</dt><dd>1 warm-up step</dd>" in page


def test_a_run_is_shown_by_its_folder_alone(example_plan: Path, tmp_path: Path) -> None:
    run = tmp_path / "tiny-001"
    run.mkdir()
    write_run(run / "metrics.jsonl", example_plan)
    target = tmp_path / "report.html"
    missing = fcp("report", run, "-o", target)
    assert (missing.returncode, target.exists()) == (1, False)
    assert missing.stderr == f"error: {run} has no plan.parquet; name the plan: fcp report PLAN --metrics {run}\n"
    (run / "plan.parquet").write_bytes(example_plan.read_bytes())
    assert fcp("report", run, "-o", target).returncode == 0
    page = target.read_text()
    assert "Run tiny-001" in page
    assert charts_of(page).keys() == PLAN_CHARTS | RUN_CHARTS


def test_static_and_ours_are_one_step_on_one_time_axis(page: str) -> None:
    specs = charts_of(page)
    ends = [specs[name]["layer"][-1]["data"] for name in ("static", "ours")]
    assert ends[0] == ends[1] and "static ends" in ends[0]["values"]


def test_a_run_without_losses_or_memory_is_drawn_without_them(example_plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", example_plan)
    run.write_text(re.sub(r'"loss":[\d.]+', '"loss":null', run.read_text()))
    assert fcp("report", example_plan, "--metrics", run, "-o", tmp_path / "report.html").returncode == 0
    assert charts_of((tmp_path / "report.html").read_text()).keys() == (PLAN_CHARTS | RUN_CHARTS) - {"loss"}


def test_a_page_never_replaces_what_it_shows(example_plan: Path) -> None:
    before = example_plan.read_bytes()
    result = fcp("report", example_plan, "-o", example_plan)
    assert (result.returncode, example_plan.read_bytes()) == (2, before)
    assert "would overwrite the source; name another file with -o" in result.stderr


def test_a_plan_alone_has_no_measured_charts(example_plan: Path, tmp_path: Path) -> None:
    result = fcp("report", example_plan, "-o", tmp_path / "report.html")
    assert result.returncode == 0, result.stderr
    assert charts_of((tmp_path / "report.html").read_text()).keys() == PLAN_CHARTS


def test_the_metrics_of_another_plan_are_named_on_the_page_and_left_out(example_plan: Path, tmp_path: Path) -> None:
    make_example_plan(tmp_path / "other.parquet", seed=1)
    run = write_run(tmp_path / "metrics.jsonl", tmp_path / "other.parquet")
    result = fcp("report", example_plan, "--metrics", run, "-o", tmp_path / "report.html")
    assert result.returncode == 0
    assert "is of another plan" in result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "the page shows only the plan" in page
    assert charts_of(page).keys() == PLAN_CHARTS


def test_an_edited_plan_is_shown_with_a_warning_on_the_page(example_plan: Path, tmp_path: Path) -> None:
    path = edited(example_plan, tmp_path / "plan.parquet", change_column("seconds", lambda seconds: seconds * 0.9))
    result = fcp("report", path, "-o", tmp_path / "report.html")
    assert result.returncode == 0
    assert len(result.stderr.splitlines()) == 2
    for text in (result.stderr, (tmp_path / "report.html").read_text()):
        assert "was edited: its hash was" in text and "; see: fcp check" in text


def test_a_plan_without_any_step_to_show_leaves_no_page(example_plan: Path, tmp_path: Path) -> None:
    path = edited(example_plan, tmp_path / "plan.parquet", change_column("step_seconds", lambda seconds: 0.0))
    result = fcp("report", path, "-o", tmp_path / "report.html")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "has no displayable step (step 0: it takes no time" in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_the_figures_of_the_page_are_one_json_document(example_plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", example_plan)
    result = fcp("report", example_plan, "--metrics", run, "-o", tmp_path / "report.html", "--json")
    document = json.loads(result.stdout)
    assert document["bytes"] == (tmp_path / "report.html").stat().st_size
    assert (document["steps"], document["steps_of_plan"], document["warnings"]) == (4, 4, [])
    assert document["measured"]["ratio"] > 1
    inspected = json.loads(fcp("inspect", example_plan, "--json").stdout)
    for name in ("plan_hash", "gap", "idle_fraction", "mean_step_seconds", "degrees"):
        assert document[name] == inspected[name]
    assert document["speedup_over_static"] == pytest.approx(inspected["speedup_over_static"])


def test_a_plan_without_baselines_says_that_its_gain_is_not_known(tmp_path: Path) -> None:
    inputs = PlanInputs(table=long_tail(), problem=example_problem(), settings=BatchSettings(global_batch_size=60))
    make_plan(tmp_path / "plan.parquet", inputs, workers=1)
    result = fcp("report", tmp_path / "plan.parquet", "-o", tmp_path / "report.html", "--json")
    assert json.loads(result.stdout)["speedup_over_static"] is None
    assert "The gain over a static degree is not known" in (tmp_path / "report.html").read_text()


def test_a_run_cut_short_is_shown_as_far_as_it_goes(example_plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", example_plan)
    run.write_text(run.read_text()[:-50])
    result = fcp("report", example_plan, "--metrics", run, "-o", tmp_path / "report.html")
    assert result.returncode == 0
    assert "line 5 truncated or damaged; skipped" in result.stderr
    assert charts_of((tmp_path / "report.html").read_text()).keys() == PLAN_CHARTS | RUN_CHARTS


def test_a_run_that_has_only_warmed_up_shows_what_there_is(example_plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", example_plan)
    run.write_text("".join(f"{line}\n" for line in run.read_text().splitlines()[:2]))
    assert fcp("report", example_plan, "--metrics", run, "-o", tmp_path / "report.html").returncode == 0
    assert charts_of((tmp_path / "report.html").read_text()).keys() == PLAN_CHARTS | {"measured"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.parquet"], "there is no plan gone.parquet"),
        (["PLAN", "-o", "nowhere/report.html"], "there is no folder nowhere"),
    ],
)
def test_mistakes_get_one_line(example_plan: Path, arguments: list[str], message: str) -> None:
    result = fcp("report", *(str(example_plan) if argument == "PLAN" else argument for argument in arguments))
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.processes
def test_a_missing_library_is_named_with_the_command_that_installs_it(example_plan: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['vl_convert'] = None; from fcp_cli.cli.app import main; main()"
    command = [sys.executable, "-c", code, "report", str(example_plan), "-o", str(tmp_path / "report.html")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 1
    assert "pip install 'vl-convert-python>=1.7'" in result.stderr
    assert not (tmp_path / "report.html").exists()
