"""Launch targets of other packages: one that is installed writes its files, and a broken one breaks only itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.planning_folder import fcp
from tests.plugin_packages import install

PBS = """
from pathlib import Path
from fcp_cli.extend import NodeFacts, Target, variable

def node(job):
    return NodeFacts(rank=variable("PBS_NODENUM"), master_addr=variable("MASTER_ADDR"), log_name=variable("PBS_JOBID"))

TARGET = Target(
    template="job.pbs",
    folder=Path(__file__).parent,
    options=frozenset({"setup"}),
    node=node,
    start=lambda folder: ("qsub", str(folder / "job.pbs")),
)
"""
TEMPLATE = """\
#PBS -N {{ job_name }}
#PBS -l select={{ num_nodes }}
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
pbsdsh -- {{ command | lines(8) }}
"""
LAUNCH = ("launch", "--model", "qwen3-8b", "--synthetic", "--ranks", "16", "--device", "cuda", "--nodes", "2")


def launch(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    done = fcp(*LAUNCH, *words, cwd=tmp_path, COLUMNS="500")
    return done.returncode, done.stdout, done.stderr


def with_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, **names: str) -> None:
    entries = names or {"pbs": "fcp_pbs:TARGET"}
    site = install(tmp_path, monkeypatch, "fcp-pbs", text=text, group="fcp.targets", entries=entries)
    (site / "job.pbs.j2").write_text(TEMPLATE, encoding="utf-8")


def test_an_installed_package_adds_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_target(tmp_path, monkeypatch, PBS)
    assert "pbs" in fcp("list", "targets", cwd=tmp_path).stdout.split()
    status, script, said = launch(tmp_path, "--target", "pbs", "--run-dir", "runs/mine", "--dry-run")
    assert status == 0, said
    assert script.startswith("#PBS -N mine\n#PBS -l select=2\n")
    assert '-m fcp_cli.launching.node \\\n        --node-rank="$PBS_NODENUM" ' in script


@pytest.mark.parametrize("option", ["--image=a", "--sbatch-option=-x", "--hostfile=hosts"])
def test_it_takes_the_options_that_it_names_alone(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_target(tmp_path, monkeypatch, PBS)
    status, _, said = launch(tmp_path, "--target", "pbs", option, "--dry-run")
    assert status == 2
    assert f"error: {option.partition('=')[0]} is for --target " in said
    assert said.rstrip().endswith(", not for pbs")


BROKEN = {
    "a missing library": ("import no_such_library\n", "cannot be imported from fcp_pbs:TARGET: ModuleNotFoundError: "),
    "another type": ("TARGET = 3\n", "is no fcp_cli.extend.Target but int at fcp_pbs:TARGET"),
    "a failing node": (PBS.replace("return NodeFacts", "1 / 0; return NodeFacts"), "failed: ZeroDivisionError: "),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_target_is_one_line_that_names_its_package(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = BROKEN[fault]
    with_target(tmp_path, monkeypatch, text)
    status, script, said = launch(tmp_path, "--target", "pbs", "--dry-run")
    assert (status, script) == (1, "")
    last = said.splitlines()[-1]
    assert last.startswith(f"error: target pbs of the package fcp-pbs 2.5 {message}"), said
    assert launch(tmp_path, "--target", "slurm", "--dry-run")[0] == 0


def test_an_unknown_target_names_those_of_packages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_target(tmp_path, monkeypatch, PBS)
    status, _, said = launch(tmp_path, "--target", "pbss", "--dry-run")
    assert status == 2
    assert "error: --target is 'pbss'; it must be one of local, scripts, slurm, " in said
    assert said.rstrip().endswith(", pbs; did you mean 'pbs'?")


def test_no_package_replaces_a_target_of_fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_target(tmp_path, monkeypatch, "raise SystemExit\n", slurm="fcp_pbs:TARGET")
    assert "#SBATCH" in launch(tmp_path, "--target", "slurm", "--dry-run")[1]
    listed = fcp("list", "targets", cwd=tmp_path, COLUMNS="500")
    assert "ignored: target slurm of the package fcp-pbs 2.5 has the name of fcp's own target" in listed.stderr
