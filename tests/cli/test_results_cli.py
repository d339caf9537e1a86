"""Results go to standard output, so that `fcp VERB > file` keeps them; everything else goes to standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from docs.hooks.reference import command_entries
from tests.cli.planning_folder import EIGHT_RANKS, fcp, write_dataset
from tests.report.runs import write_run

_RESULTS: Final = {
    "check": ("check plan.parquet", "plan.parquet is sound: 4 steps"),
    "compare": (
        f"compare dataset.parquet {' '.join(EIGHT_RANKS)} --solvers static,karmarkar-karp --steps 1",
        "karmarkar-karp",
    ),
    "env": ("env", "python"),
    "inspect": ("inspect plan.parquet --step 0", "degree"),
    "list": ("list models", "qwen3-8b"),
    "manifest build": ("manifest build dataset.parquet -o built.parquet", "longest 1 %"),
    "manifest show": ("manifest show dataset.parquet", "longest 1 %"),
    "plan": (f"plan dataset.parquet {' '.join(EIGHT_RANKS)} --solver static -o other.parquet", "step time"),
    "profile": ("profile --analytic --model qwen3-8b --cluster h100-8x8 -o made.yaml", "of degree 8"),
    "profile show": ("profile show profile.yaml", "attention_seconds_per_tok"),
    "watch": ("watch run --once", "4/4"),
}
"""Command -> a line that works in the folder, and words of its result."""
_COMMANDS: Final = [pytest.param(name, marks=pytest.mark.torch if name == "env" else ()) for name in _RESULTS]
_ELSEWHERE: Final = {
    "": "it has no result of its own",
    "manifest": "it has no result of its own",
    "manifest merge": "it reports as manifest build does",
    "report": "its result is a file",
    "launch": "its result is a run; tests/cli/test_launch_cli.py has --dry-run, --explain and --preflight",
    "demo": "tests/cli/test_show.py has the console that it prints on; it takes two minutes",
    "selftest": "tests/verification: it takes minutes",
    "verify": "tests/verification/test_verify.py: it needs torch",
    "profile fit": "tests/cli/test_profile_cli.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_dataset(tmp_path_factory.mktemp("results"))
    made = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--solver", "static", cwd=folder)
    assert made.returncode == 0, made.stderr
    (folder / "run").mkdir()
    write_run(folder / "run" / "metrics.jsonl", folder / "plan.parquet")
    (folder / "runs" / "started").mkdir(parents=True)
    (folder / "runs" / "started" / "launch.json").write_text("{}")
    return folder


def test_every_command_is_tried_or_says_where_its_result_goes() -> None:
    assert {" ".join(entry.words) for entry in command_entries()} == {*_RESULTS, *_ELSEWHERE}


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_result_is_on_standard_output_alone(folder: Path, command: str) -> None:
    line, words = _RESULTS[command]
    done = fcp(*line.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert words not in done.stderr
    remarks = ("assumed ", "warning: ", "wrote ")
    assert [each for each in done.stdout.splitlines() if each.startswith(remarks)] == []


@pytest.mark.parametrize("command", _COMMANDS)
def test_with_json_standard_output_is_one_document(folder: Path, command: str) -> None:
    line, _ = _RESULTS[command]
    done = fcp(*line.split(), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize(
    "line",
    [
        f"plan dataset.parquet {' '.join(EIGHT_RANKS)} --solver static -o -",
        "profile --analytic --model qwen3-8b --cluster h100-8x8 -o -",
    ],
)
def test_a_file_on_standard_output_has_no_table_in_it(folder: Path, line: str) -> None:
    done = fcp(*line.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("PAR1", "format: fcp-cost-profile"))
    assert "of degree 8" not in done.stdout


def test_quiet_prints_no_result(folder: Path) -> None:
    done = fcp("inspect", "plan.parquet", "-q", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
