"""The templates in launchers/ call `fcp launch` rightly; Slurm and ssh are faked by small scripts on the PATH."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fcp_cli.files import shipped

_ARGUMENTS = ["--plan", "my plan.parquet", "--", "train.py", "--note", "two words"]


class FakeCommands:
    """Executables that stand for the outside world; `fcp` writes down its arguments, one per line."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.calls.mkdir()
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.add("fcp", f'printf "%s\\n" "$@" > {self.calls}/node-"$5"')

    def add(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, template: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(shipped("launchers") / template), *_ARGUMENTS],
            env={**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}", **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def arguments(self, node: int) -> list[str]:
        return (self.calls / f"node-{node}").read_text().splitlines()


def expected(node: int, master: str) -> list[str]:
    return ["launch", "--nodes", "2", "--node-rank", str(node), "--master-addr", master, *_ARGUMENTS]


def test_slurm_starts_every_node_with_its_own_rank_and_one_master(tmp_path: Path) -> None:
    fake = FakeCommands(tmp_path)
    fake.add("scontrol", 'printf "%s\\n" host-a host-b')
    fake.add("srun", 'shift; for k in 0 1; do SLURM_NODEID=$k "$@" || exit 1; done')
    result = fake.run("slurm.sbatch", {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_NNODES": "2"})
    assert result.returncode == 0, result.stderr
    assert [fake.arguments(0), fake.arguments(1)] == [expected(0, "host-a"), expected(1, "host-a")]


def test_ssh_starts_every_node_in_the_shared_folder(tmp_path: Path) -> None:
    fake = FakeCommands(tmp_path)
    shared = tmp_path / "shared folder"
    shared.mkdir()
    fake.add("ssh", 'echo "$2" >> "$FOLDER/hosts"; bash -c "$3"')
    result = fake.run("ssh-nodes.sh", {"NODES": "host-a host-b", "FOLDER": str(shared)})
    assert result.returncode == 0, result.stderr
    assert sorted((shared / "hosts").read_text().split()) == ["host-a", "host-b"]
    assert [fake.arguments(0), fake.arguments(1)] == [expected(0, "host-a"), expected(1, "host-a")]


def test_ssh_reports_the_status_of_a_node_that_failed(tmp_path: Path) -> None:
    fake = FakeCommands(tmp_path)
    fake.add("ssh", '[ "$2" = host-a ] && exit 0; exit 7')
    assert fake.run("ssh-nodes.sh", {"NODES": "host-a host-b", "FOLDER": str(tmp_path)}).returncode == 7
