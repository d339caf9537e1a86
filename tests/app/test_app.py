"""The root command: precedence of settings, one line per error, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.planning_folder import fcp, fcp_process
from tests.patience import PATIENCE_SECONDS

HEAVY = ("torch", "numba", "scipy", "pyarrow", "numpy", "transformers", "yaml")


@pytest.mark.processes
def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, contextlib, io\n"
        "sys.argv = ['fcp', '--help']\n"
        "from fcp_cli.cli.app import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.processes
def test_the_version_is_printed_alone(tmp_path: Path) -> None:
    result = fcp_process("--version", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("fcp ")


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (("pan",), ("no such command 'pan'", " --help'")),
        (("plan", "a", "--rank", "3"), ("no such option: --rank", " plan --help'")),
        (("plan", "a", "--ranks"), ("option '--ranks' requires an argument; see '", " plan --help'")),
        (("plan", "a", "b"), ("got unexpected extra argument", " plan --help'")),
        (("plan", "a", "--ranks", "0"), ("--ranks is 0; it must be at least 1; see '", " plan --help'")),
        (("plan", "a", "--ranks", "two"), ("--ranks is 'two'; it must be a whole number; see '", " plan --help'")),
        (("plan", "a", "--sync", "waves"), ("--sync is 'waves'; it must be one of iteration, microbatch", "--help'")),
        (("profile", "fit"), ("missing argument ", " profile fit --help'")),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(
    tmp_path: Path, words: tuple[str, ...], ends: tuple[str, str]
) -> None:
    result = fcp(*words, cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {ends[0]}")
    assert line.endswith(ends[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan: [", "fcp.yaml is not valid YAML"),
        ("- plan", "fcp.yaml must map commands to their options"),
        ("plan: 3", "fcp.yaml: the options of 'plan' must be a mapping"),
        ("plan: {rank: 3}", "fcp.yaml: 'plan' has no option 'rank'; did you mean 'ranks'?"),
        ("pan: {ranks: 3}", "fcp.yaml: there is no command 'pan'; did you mean 'plan'?"),
    ],
)
def test_a_damaged_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "fcp.yaml").write_text(text)
    result = fcp("plan", "dataset.parquet", cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_wrong_value_that_was_not_typed_says_where_it_was_set(tmp_path: Path) -> None:
    (tmp_path / "fcp.yaml").write_text("plan: {ranks: four}")
    result = fcp("plan", "dataset.parquet", cwd=tmp_path)
    assert result.returncode == 2
    assert "--ranks is 'four'; it must be a whole number (set by plan.ranks in fcp.yaml); see" in result.stderr
    result = fcp("plan", "dataset.parquet", cwd=tmp_path, FCP_PLAN_RANKS="four")
    assert "(set by FCP_PLAN_RANKS)" in result.stderr
    assert "(set" not in fcp("plan", "dataset.parquet", "--ranks", "four", cwd=tmp_path).stderr


def test_a_switch_that_was_not_typed_must_be_true_or_false(tmp_path: Path) -> None:
    result = fcp("plan", "dataset.parquet", cwd=tmp_path, FCP_PLAN_SHUFFLE="maybe")
    assert result.stderr.startswith("error: invalid value for '--shuffle'")
    assert "(set by FCP_PLAN_SHUFFLE); see" in result.stderr


def test_an_error_of_a_verb_says_where_the_option_that_it_names_was_set(tmp_path: Path) -> None:
    (tmp_path / "fcp.yaml").write_text("profile: {show: {degrees: '1,x'}}")
    result = fcp("profile", "show", cwd=tmp_path)
    assert "(set by profile.show.degrees in fcp.yaml)" in result.stderr


def test_no_config_ignores_the_file_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "fcp.yaml").write_text("plan: [")
    result = fcp("--no-config", "plan", "absent.parquet", cwd=tmp_path)
    assert result.returncode == 1
    assert "absent.parquet" in result.stderr


@pytest.mark.torch
def test_quiet_stands_before_or_behind_a_verb(tmp_path: Path) -> None:
    for words in (("-q", "launch"), ("launch", "-q"), ("launch", "--quiet")):
        result = fcp(*words, "--model", "qwen3-tiny", "--dry-run", "--ranks", "64", cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), words
    launch = ("--model", "qwen3-tiny", "--dry-run", "--ranks", "64", "--run-dir", "-q", "--", "-m", "x", "-q")
    loud = fcp("launch", *launch, cwd=tmp_path)
    assert "assumed --device" in loud.stderr  # there, it is a value, or somebody else's word
    assert loud.stdout.splitlines()[-1].endswith("x -q")


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        (("plan",), "plan [OPTIONS] [MANIFEST]"),
        (("check",), "check [OPTIONS] [PLAN]"),
        (("manifest", "build"), "manifest build [OPTIONS] SOURCE..."),
    ],
)
def test_usage_is_written_as_everybody_writes_it(tmp_path: Path, verb: tuple[str, ...], usage: str) -> None:
    assert f" {usage} " in " ".join(fcp(*verb, "--help", cwd=tmp_path).stdout.split())


def test_a_config_may_give_one_word_for_what_is_repeated_and_a_list_for_numbers(tmp_path: Path) -> None:
    (tmp_path / "fcp.yaml").write_text("profile: {show: {degrees: [1, 3]}}\nmanifest: {build: {include: '*.txt'}}")
    (tmp_path / "a.txt").write_text("some words")
    assert fcp("manifest", "build", ".", cwd=tmp_path).returncode == 0
    assert fcp("profile", "--analytic", cwd=tmp_path).returncode == 0
    result = fcp("profile", "show", "profile.yaml", cwd=tmp_path)
    assert (result.returncode, "of degree 3 from" in result.stdout) == (0, True)
