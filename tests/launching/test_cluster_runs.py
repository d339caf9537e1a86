"""Generated jobs for real: two emulated nodes of two ranks, torchrun and gloo, started as ssh and Slurm would."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from tests.launching.cluster_jobs import FakeCluster
from tests.patience import PATIENCE_SECONDS
from tests.ports import unused_port
from tests.training.small_runs import fcp_command, write_manifest, write_small_plan

pytestmark = [pytest.mark.torch, pytest.mark.distributed]

RECORD = {"logs", "owner.json", "plan.parquet", "profile.yaml", "versions.json"}
HERE = socket.gethostname()
# Every rank adds up all ranks' numbers; node 0's first rank tells.
_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from fcp_cli.plan.file import PlanReader
dist.init_process_group("gloo")
assert PlanReader(os.environ["FCP_PLAN"]).metadata.num_ranks == dist.get_world_size() == 4
total = torch.tensor([2 ** dist.get_rank()])
dist.all_reduce(total)
if sys.argv[1] == str(dist.get_rank()):
    print("I am the one", file=sys.stderr, flush=True)
    os._exit(1)  # gloo's threads sometimes abort in the interpreter's teardown, which would be another end
if dist.get_rank() == 0:
    print("total", total.item(), "of local", os.environ["LOCAL_WORLD_SIZE"], sys.argv[2:], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a cluster")
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=1, model="qwen3-tiny")
    (folder / "my script.py").write_text(_SCRIPT)
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path)


def launch(folder: Path, cluster: FakeCluster, *words: str) -> subprocess.CompletedProcess[str]:
    options = ("--device", "cpu", "--nodes", "2", "--master-port", str(unused_port()))
    return subprocess.run(
        fcp_command("launch", *options, *words), cwd=folder, env=cluster.environment(), capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def test_the_scripts_of_two_nodes_make_one_job(folder: Path, cluster: FakeCluster) -> None:
    (folder / "hosts").write_text(f"# two nodes\n{HERE} slots=2\nanother-name\n")
    job = folder / "my job"
    words = ("--", "my script.py", "none", "two words", "$x")
    written = launch(folder, cluster, "--hostfile", "hosts", "--run-dir", "runs/ssh", "-o", str(job), *words)
    assert written.returncode == 0, written.stderr
    assert written.stderr.splitlines()[-1] == f"start the job with: bash '{job}/start.sh'"
    ran = cluster.run("bash", str(job / "start.sh"))
    assert (ran.returncode, ran.stdout) == (0, "total 15 of local 2 ['two words', '$x']\n"), ran.stderr
    assert sorted(cluster.ssh_hosts.read_text().split()) == sorted([HERE, "another-name"])
    run_dir = folder / "runs" / "ssh"
    assert {path.name for path in run_dir.iterdir()} == {"launch.json", *RECORD}
    assert (run_dir / "launch.json").read_text() == (job / "launch.json").read_text()
    assert json.loads((run_dir / "owner.json").read_text())["ended"] == "finished"
    logs = {path.parent.parent.parent.parent.name[-5:] for path in run_dir.glob("logs/*/*/attempt_0/*/stdout.log")}
    assert logs == {"node0", "node1"}


def test_the_first_node_that_fails_ends_the_job_and_names_its_rank(folder: Path, cluster: FakeCluster) -> None:
    (folder / "hosts").write_text(f"{HERE}\nanother-name\n")
    job = folder / "failing"
    assert launch(folder, cluster, "--hostfile", "hosts", "-o", str(job), "--", "my script.py", "3").returncode == 0
    ran = cluster.run("bash", str(job / "start.sh"))
    assert ran.returncode == 1
    told = f"last lines of rank 3 on {HERE}:\n  I am the one\nerror: rank 3 on {HERE} exited with status 1; its whole "
    assert told in ran.stderr


def test_a_job_is_handed_to_slurm_and_runs_on_both_nodes(folder: Path, cluster: FakeCluster) -> None:
    words = ("--target", "slurm", "--sbatch-option=--partition=gpu", "--", "my script.py", "none", "it's", "a\nb")
    submitted = launch(folder, cluster, "--run-dir", "runs/a", *words)
    assert submitted.returncode == 0, submitted.stderr
    run_dir = folder / "runs" / "a"
    assert submitted.stderr.splitlines()[-1] == f"Submitted batch job 42; its output goes to {run_dir}/logs"
    assert (run_dir / "sbatch-output").read_text().splitlines() == [
        """total 15 of local 2 ["it's", 'a\\nb']""",
        "done: no step was measured; logs in runs/a/logs",
    ]
    assert cluster.sbatch_arguments.read_text().splitlines() == [f"{run_dir}/job.sbatch"]
    # Slurm takes a quoted value, as a folder with a space needs it.
    assert f"#SBATCH --output='{run_dir}/logs/slurm-%j.log'\n" in (run_dir / "job.sbatch").read_text()
    assert "--ntasks-per-node=1" in cluster.srun_options.read_text()
    assert {path.name for path in run_dir.iterdir()} - {"sbatch-output"} == {
        "job.sbatch",
        "launch.json",
        *RECORD,
    }
    assert (run_dir / "plan.parquet").read_bytes() == (folder / "plan.parquet").read_bytes()
    launched = json.loads((run_dir / "launch.json").read_text())
    assert (launched["target"], launched["files"]) == ("slurm", [{"name": "job.sbatch"}])


def test_slurm_starts_msrun_on_both_nodes(folder: Path, cluster: FakeCluster) -> None:
    root = Path(__file__).parents[2]
    cluster.add("msrun", f'PYTHONPATH={root}:$PYTHONPATH exec {sys.executable} -m tests.launching.fake_msrun "$@"')
    words = ("--target", "slurm", "--launcher", "msrun", "--", "my script.py", "none", "it's")
    submitted = launch(folder, cluster, "--run-dir", "runs/msrun", *words)
    assert submitted.returncode == 0, submitted.stderr
    run_dir = folder / "runs" / "msrun"
    assert (run_dir / "sbatch-output").read_text().splitlines()[-2:] == [
        """total 15 of local 2 ["it's"]""",
        "done: no step was measured; logs in runs/msrun/logs",
    ]
    logs = {path.name for path in run_dir.glob("logs/*/worker_*.log")}
    assert logs == {f"worker_{rank}.log" for rank in range(4)}


def test_an_allocation_of_another_size_is_refused_before_anything_starts(folder: Path, cluster: FakeCluster) -> None:
    words = ("--target", "slurm", "-o", str(folder / "other"), "--", "my script.py", "none")
    assert launch(folder, cluster, *words).returncode == 0
    ran = cluster.run_batch_script(folder / "other" / "job.sbatch", nodes=3)
    assert ran.returncode == 1
    assert ran.stderr == snapshot("error: this job needs 2 node(s), but Slurm gave 3; leave --nodes as it is\n")
    assert not cluster.srun_options.exists()
