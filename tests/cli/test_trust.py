"""A config file of the current folder sets what runs commands only if the user names it."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.cli.config import _trust
from fcp_cli.launching.request import LaunchRequest
from fcp_cli.util.options import options_of
from tests.cli.planning_folder import fcp, write_dataset
from tests.syntax import nodes_of

HOSTILE = "launch: {target: slurm, setup: touch pwned, template: evil.j2}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return write_dataset(folder)


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return fcp(*words, cwd=folder, **env)


def test_a_found_file_that_runs_commands_is_refused(folder: Path) -> None:
    (folder / "fcp.yaml").write_text(HOSTILE)
    (folder / "evil.j2").write_text('{{ lipsum.__globals__["os"].popen("touch pwned").read() }}')
    refused = run(folder, "launch", "--dry-run")
    assert (refused.returncode, refused.stderr) == (
        2,
        snapshot(
            "error: fcp.yaml was found in this folder and sets launch.template, launch.setup, which may run commands; "
            "read it, then name it with '--config fcp.yaml'\n"
        ),
    )
    assert not (folder / "pwned").exists()


def test_what_the_user_names_needs_no_trust(folder: Path) -> None:
    (folder / "fcp.yaml").write_text(HOSTILE)
    for words, env in (
        (("--config", "fcp.yaml", "launch", "--dry-run"), {}),
        (("launch", "--dry-run"), {"FCP_CONFIG": "fcp.yaml"}),
        (("launch", "--dry-run", "--setup", "true", "--template", "own.j2"), {}),
        (("--no-config", "launch", "--dry-run"), {"FCP_LAUNCH_SETUP": "true"}),
    ):
        assert "was found" not in run(folder, *words, **env).stderr


def test_a_found_file_may_set_all_else(folder: Path) -> None:
    (folder / "fcp.yaml").write_text("plan: {global-batch-size: 16, output: out/../mine.parquet}\n" + HOSTILE)
    done = run(folder, "plan", "dataset.parquet")
    assert done.returncode == 0, done.stderr
    assert (folder / "mine.parquet").is_file()


@pytest.mark.parametrize("output", ["../outside.parquet", "/tmp/outside.parquet", "link/outside.parquet"])
def test_a_found_file_writes_nowhere_else(folder: Path, output: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    (folder / "fcp.yaml").write_text(f"plan: {{output: {output}}}")
    refused = run(folder, "plan", "dataset.parquet")
    assert refused.returncode == 2
    assert "sets plan.output, which may write outside of its folder; read it" in refused.stderr
    assert not (folder.parent / "outside.parquet").exists()


def test_every_option_of_launch_that_becomes_a_command_needs_trust() -> None:
    marked = {option.name: _trust(option) for option in options_of(LaunchRequest) if _trust(option)}
    assert marked == {
        **dict.fromkeys(["template", "hostfile", "setup", "sbatch_option", "srun_option", "image", "mount"], "runs"),
        **dict.fromkeys(["python", "master_addr", "wandb", "env"], "runs"),
        **dict.fromkeys(["run_dir", "output"], "writes"),
    }


def test_every_output_of_a_command_stays_in_the_folder_of_a_found_file() -> None:
    package = Path(__file__).parents[2] / "fcp_cli"
    outputs = [
        node
        for path in package.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and any("'--output'" in ast.unparse(word) for word in node.keywords)
    ]
    assert len(outputs) >= 9
    assert [ast.unparse(node) for node in outputs if "trust='writes'" not in ast.unparse(node)] == []
