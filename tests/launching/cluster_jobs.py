"""A cluster job that the tests of the targets share, and stand-ins for Slurm and ssh."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.job import Job, Variable
from fcp_cli.launching.request import ClusterOptions, Launcher
from fcp_cli.launching.target_options import option_values
from fcp_cli.launching.targets import TARGETS
from fcp_cli.util.console import Assumptions
from tests.forked_ranks import shared_by_scripts
from tests.launching.jobs import job
from tests.patience import PATIENCE_SECONDS


def cluster_job(*, device: str = "cuda", num_nodes: int = 2, launcher: Launcher = "torchrun") -> Job:
    """The bundled trainer on nodes of 8 devices, with awkward paths and arguments."""
    made = job(
        device,
        plan=Path("/shared/my data/plan.parquet"),
        run_dir=Path("/shared/runs/qwen3-8b-001"),
        num_nodes=num_nodes,
        processes_per_node=8,
        node_rank=None,
        arguments=("--model", "qwen3-8b", "--note", 'it\'s 5 $ \\ "quoted"\nand a second line'),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        python="/shared/venv/bin/python",
        launcher=launcher,
        directory=Path("/shared/my code"),
        variables=(Variable(name="GLOO_SOCKET_IFNAME", value="", reason="each node's own", source="its route"),),
        hosts=tuple(f"10.0.0.{k + 1}" for k in range(num_nodes)),
    )
    options = ClusterOptions(
        setup=("module load cuda/12.8",),
        sbatch_option=("--partition=gpu", "--time=24:00:00"),
        image="registry.example/fcp:1",
        mount=("shared:/shared",),
    )
    return replace(made, values=option_values(options, TARGETS["trainjob"], made, Assumptions()))


class FakeCluster:
    """Slurm's and ssh's commands as small programs on the PATH; every node is this machine.

    `sbatch` runs the script at once, in the environment that Slurm gives the batch script; `srun` starts one task per
    node with SLURM_NODEID, and ends all when one fails, as --kill-on-bad-exit does.
    """

    NODES = ("127.0.0.1", "localhost")

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.srun_options = folder / "srun-options"
        self.sbatch_arguments = folder / "sbatch-arguments"
        self.ssh_hosts = folder / "ssh-hosts"
        nodes = " ".join(self.NODES)
        self.add("scontrol", f'[ "$1 $2 $3" = "show hostnames cluster[0-1]" ] && printf "%s\\n" {nodes}')
        self.add("srun", f"options={self.srun_options}\n{_SRUN}")
        self.add("sbatch", f'printf "%s\\n" "$@" > {self.sbatch_arguments}\n{_SBATCH}')
        self.add("ssh", f'[ "$1 $2" = "-tt --" ] || exit 9\necho "$3" >> {self.ssh_hosts}\nexec bash -c "$4"')

    def add(self, name: str, body: str) -> None:
        """Put a bash program on the PATH."""
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **shared_by_scripts(), "PATH": f"{self._bin}:{os.environ['PATH']}", **more}

    def run(self, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environment(**more), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    def run_batch_script(self, script: Path, *, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        """As Slurm starts a batch script on the first node of an allocation."""
        return self.run("bash", str(script), **allocation(nodes))


def allocation(nodes: int) -> dict[str, str]:
    """What Slurm tells a batch script."""
    return {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "cluster[0-1]", "SLURM_NNODES": str(nodes)}


_SRUN = """
while [[ $1 == --* ]]; do echo "$1" >> "$options"; shift; done
for k in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$k SLURM_PROCID=$k SLURM_LOCALID=0 "$@" &
done
status=0
for _ in $(seq "$SLURM_NNODES"); do
    wait -n || { status=$?; kill $(jobs -p) 2>/dev/null; }
done
exit $status
"""
_SBATCH = """
script=${*: -1}
export SLURM_JOB_ID=42 SLURM_JOB_NODELIST='cluster[0-1]' SLURM_NNODES=2
output=$(dirname "$script")/sbatch-output
bash "$script" > "$output" 2>&1 && echo "Submitted batch job 42"
"""
