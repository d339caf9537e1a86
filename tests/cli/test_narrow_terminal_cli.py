"""Tables in a terminal of 60 columns: columns are left out, and no figure or name is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcp_cli.cli.app import app
from fcp_cli.cost.explain import figures_of
from fcp_cli.cost.profile import load_cost_profile
from tests.cli.planning_folder import fcp

PROFILES = Path(__file__).parents[2] / "profiles" / "cost"
ONE = str(PROFILES / "qwen3-vl-8b-example-8x8.yaml")


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "60", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_profile_keeps_its_figures_whole() -> None:
    said = shown("profile", "show", ONE)
    figures = figures_of(load_cost_profile(Path(ONE)))
    for path, (value, _meaning) in figures.items():
        name = path.split(".")[-1]
        assert re.search(rf"^ *{name} +{re.escape(f'{value:.4g}')} ", said, re.MULTILINE), name
    assert "…" not in said


@pytest.mark.parametrize("lengths", [[3, 900_000], [70_000] * 9])
def test_the_histogram_of_a_manifest_has_shorter_bars(tmp_path: Path, lengths: list[int]) -> None:
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    said = shown("manifest", "show", str(tmp_path / "lengths.txt"))
    assert "…" not in said
    assert re.search(r"64k - 128k +100\.0% █+ +100\.0% █+|512k - 1M +50\.0% █+ +100\.0% █+", said)
    assert max(len(line) for line in said.splitlines() if "%" in line) <= 60


@pytest.mark.parametrize("value", ["0", "1", "-5", "abc", "", "1000000000", str(2**63), "1" + 30 * "0"])
@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_a_terminal_of_no_size_still_gets_words(tmp_path: Path, name: str, value: str) -> None:
    shown = fcp("profile", "show", ONE, cwd=tmp_path, **{name: value})
    assert shown.returncode == 0 and "attention_seconds_per_tok" in shown.stdout
    wrong = fcp("plan", "--no-such-option", cwd=tmp_path, **{name: value})
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: no such option: --no-such-option")
