from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.runs.owner import own
from tests.cli.planning_folder import assert_one_error_line, fcp
from tests.patience import PATIENCE_SECONDS
from tests.report.runs import write_run


def test_through_a_pipe_a_finished_run_is_plain_lines(example_plan: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", example_plan)
    result = fcp("watch", ".", "--every", "1", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/4", "2/4", "3/4", "4/4"]
    assert re.fullmatch(
        r"finished: steps 1 to 4, loss 5\.0000 -> 4\.7000, [\d.]+[kM]? tokens in [\d.]+ s; "
        r"a step took [\d.]+ s, planned [\d.]+ s \(x\d\.\d\d(; load \d+ on \d+ cores?)?\)",
        lines[-1],
    )
    assert "\x1b" not in result.stdout
    assert max(map(len, lines[:-1])) <= 80


def test_damaged_lines_are_counted_in_a_warning(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], '{"kind":"step"}\n', "oops\n", *lines[2:]]))
    for words in (("--once",), ()):
        result = fcp("watch", ".", *words, cwd=tmp_path)
        warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert (result.returncode, warnings) == (0, ["warning: metrics.jsonl: 2 lines damaged; skipped"])


def test_a_finished_run_without_a_measured_step_says_so(tmp_path: Path) -> None:
    """As of a script that was started with --inject none and follows the plan by means of its own."""
    (tmp_path / "launch.json").write_text("{}")
    with own(tmp_path) as owned:
        owned.ended = "finished"
    result = fcp("watch", ".", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "finished: no step was measured\n")


def test_it_waits_for_a_launched_run_and_ends_with_it(
    example_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the command sleeps, the run writes one more line."""
    written = write_run(tmp_path / "whole.jsonl", example_plan).read_text().splitlines(keepends=True)
    (tmp_path / "launch.json").write_text("{}")

    def write_more(_: float) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(written.pop(0))

    monkeypatch.setattr(time, "sleep", write_more)
    result = fcp("watch", ".", "--every", "1", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stderr == "waiting for metrics.jsonl\n"
    assert [line.split()[1] for line in result.stdout.splitlines()[:-1]] == ["1/4", "2/4", "3/4", "4/4"]
    assert written == []


def test_on_a_terminal_it_draws_the_ranks(example_plan: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", example_plan)
    result = fcp("watch", ".", cwd=tmp_path, FORCE_COLOR="1", TERM="xterm")
    assert result.returncode == 0
    assert "finished" in result.stdout
    assert "idle per rank" in result.stdout


def test_one_look_shows_a_run_that_is_under_way(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    result = fcp("watch", "metrics.jsonl", "--once", cwd=tmp_path)
    assert result.returncode == 0
    assert "2/4" in result.stdout and " left" in result.stdout


def test_the_state_is_one_json_document(example_plan: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", example_plan)
    document = json.loads(fcp("watch", ".", "--json", cwd=tmp_path).stdout)
    assert (document["step"], document["steps"], document["finished"]) == (3, 4, True)
    assert len(document["idle_of_ranks"]) == 8


def test_an_interrupted_run_ends_the_watch_and_says_so(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with own(tmp_path) as owned:
        owned.ended = "interrupted"
    result = fcp("watch", ".", cwd=tmp_path)
    assert result.returncode == 1
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["1/4", "2/4"]
    assert result.stderr == "error: .: interrupted after step 2 of 4\n"
    assert json.loads(fcp("watch", ".", "--json", cwd=tmp_path).stdout)["standing"] == "interrupted"
    once = fcp("watch", ".", "--once", cwd=tmp_path)
    assert (once.returncode, once.stdout.splitlines()[-1]) == (0, "interrupted after step 2 of 4")


@pytest.mark.processes
def test_a_run_whose_launcher_was_killed_is_shown_as_dead(example_plan: Path, tmp_path: Path) -> None:
    """Killed before its ranks wrote anything, too."""
    (tmp_path / "launch.json").write_text("{}")
    code = "import os, pathlib\nfrom fcp_cli.runs.owner import own\n"
    code += "with own(pathlib.Path('.')): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=PATIENCE_SECONDS)
    os.utime(tmp_path / "owner.json", (time.time() - 60, time.time() - 60))
    result = fcp("watch", ".", cwd=tmp_path)
    assert result.returncode == 1
    assert "dead before its first step: its launcher on" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], snapshot("error: there is no run gone; name the folder that 'fcp launch' printed")),
        (["."], snapshot("error: . is not the folder of a run: it has neither metrics.jsonl nor launch.json")),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert assert_one_error_line(fcp("watch", *arguments, cwd=tmp_path), 1) == message


def test_without_a_folder_it_takes_the_run_that_was_launched_last(example_plan: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("newer", "older")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_run(tmp_path / "runs" / name / "metrics.jsonl", example_plan)
        (tmp_path / "runs" / name / "launch.json").write_text("{}")
        os.utime(tmp_path / "runs" / name / "launch.json", (1000 - number, 1000 - number))
    result = fcp("watch", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stderr.startswith("assumed RUN_DIR = runs/newer (launched last)")


def test_where_there_is_no_run_it_says_so(tmp_path: Path) -> None:
    message = assert_one_error_line(fcp("watch", cwd=tmp_path), 1)
    assert message == "error: found no run in runs; name the folder that 'fcp launch' printed"


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert "has no metrics yet" in assert_one_error_line(fcp("watch", ".", "--once", cwd=tmp_path), 1)
