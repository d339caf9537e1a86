"""The root command: precedence of settings, one line per error, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numba", "scipy", "pyarrow", "numpy", "transformers", "yaml")


def fcp(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "fcp_cli", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, contextlib, io\n"
        "sys.argv = ['fcp', '--help']\n"
        "from fcp_cli.app import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_version_is_printed_alone(tmp_path: Path) -> None:
    result = fcp("--version", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("fcp ")


def test_an_unknown_verb_is_wrong_usage(tmp_path: Path) -> None:
    assert fcp("pan", cwd=tmp_path).returncode == 2


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
    assert "(set in fcp.yaml)" in result.stderr
    result = fcp("plan", "dataset.parquet", cwd=tmp_path, env={"FCP_PLAN_RANKS": "four"})
    assert "(set by FCP_PLAN_RANKS)" in result.stderr
    assert "(set" not in fcp("plan", "dataset.parquet", "--ranks", "four", cwd=tmp_path).stderr


def test_no_config_ignores_the_file_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "fcp.yaml").write_text("plan: [")
    result = fcp("--no-config", "plan", "absent.parquet", cwd=tmp_path)
    assert result.returncode == 1
    assert "absent.parquet" in result.stderr
