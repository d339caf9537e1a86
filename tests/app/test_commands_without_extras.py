"""Every command of README and docs, in environments without extras: it runs, or names what it needs in one line.

Commands that lack a file of the page end at that file, after their imports. `make release-check` installs such environments for real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pages import PAGES, ROOT, fcp_lines
from tests.patience import PATIENCE_SECONDS

# What measures, trains and replays needs PyTorch; a page of charts its own extra. Nothing else needs anything.
NEED_TORCH = {"launch", "profile", "selftest", "verify"}
NEED_REPORT = {"report"}
_NAMES_AN_EXTRA = ("is not installed", "needs vl-convert-python: pip install")


def commands() -> list[list[str]]:
    """Commands of all pages, plans of one step first, since others read them."""
    found = {
        (*words, *(["--steps", "1"] if words[0] in ("plan", "compare") else []))
        for page in PAGES
        for words in fcp_lines(page)
    }
    return [list(words) for words in sorted(found, key=lambda words: (words[0] != "plan", words))]


def starts_processes(words: list[str]) -> bool:
    return words[0] in ("launch", "selftest", "verify") or (words[0] == "profile" and "--analytic" not in words)


def walked(environment: str, folder: Path, chosen: list[list[str]]) -> list[dict[str, Any]]:
    """Run commands in an environment and a folder with lengths, as `tests.environment_walk` reports them."""
    lengths = pa.table({"length": [4000 // i + 8 for i in range(1, 129)]})
    for name in ("lengths", "dataset"):
        pq.write_table(lengths, folder / f"{name}.parquet")
    done = subprocess.run(
        [sys.executable, "-m", "tests.environment_walk", environment],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1"},
        input=json.dumps(chosen),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    return outcomes


def broken(outcomes: list[dict[str, Any]]) -> list[str]:
    """Commands that ended other than with 0, 1 or 2 and, if not with 0, a line."""
    return [
        f"{' '.join(one['words'])}: {one['status']}: {one['said'][-400:]}"
        for one in outcomes
        if one["status"] not in (0, 1, 2)
        or "Traceback" in one["said"]
        or (one["status"] and "error: " not in one["said"])
    ]


def verbs_that_name_an_extra(outcomes: list[dict[str, Any]]) -> set[str]:
    return {
        one["words"][0] for one in outcomes if one["status"] and any(text in one["said"] for text in _NAMES_AN_EXTRA)
    }


def one_of_each(found: list[list[str]]) -> list[list[str]]:
    """The first command of every verb and subcommand, and of `profile` with --analytic and a model that fcp ships."""
    kept: dict[tuple[str, str], list[str]] = {}
    for words in found:
        is_computed = {"--analytic", "--model"} <= {*words} and "/" not in words[words.index("--model") + 1]
        kind = "--analytic" if is_computed else " ".join(words[1:2] * (words[0] == "manifest"))
        kept.setdefault((words[0], kind), words)
    return list(kept.values())


@pytest.mark.processes
def test_without_extras_only_what_measures_trains_and_draws_pages_names_one(tmp_path: Path) -> None:
    outcomes = walked("plain", tmp_path, one_of_each(commands()))
    assert broken(outcomes) == []
    assert verbs_that_name_an_extra(outcomes) <= NEED_TORCH | NEED_REPORT
    assert (tmp_path / ".bashrc").is_file()  # of --install-completion, not in the home of whoever tests
    assert {one["words"][0] for one in outcomes if "--analytic" in one["words"] and one["status"] == 0} == {"profile"}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("environment", ["plain", "fit"])
def test_every_command_of_a_page_runs_without_torch_or_names_its_extra(environment: str, tmp_path: Path) -> None:
    outcomes = walked(environment, tmp_path, commands())
    assert broken(outcomes) == []
    assert verbs_that_name_an_extra(outcomes) == NEED_TORCH | NEED_REPORT
    assert not [one for one in outcomes if "--analytic" in one["words"] and "is not installed" in one["said"]]
    assert sum(one["status"] == 0 for one in outcomes) > 30


@pytest.mark.full
@pytest.mark.hf
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_with_transformers_only_pages_need_another_extra(tmp_path: Path) -> None:
    outcomes = walked("hf", tmp_path, [words for words in commands() if not starts_processes(words)])
    assert broken(outcomes) == []
    assert verbs_that_name_an_extra(outcomes) == NEED_REPORT
