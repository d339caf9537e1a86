"""`fcp launch` for a cluster as it is typed: what it prints, writes and refuses. Nothing is started here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.util import machine
from fcp_cli.util.machine import LocalDevices
from tests.cli.planning_folder import typed
from tests.training.small_runs import write_manifest, write_small_plan

Fcp = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fcp:
    """Run `fcp launch ...` in this process and an empty folder, on a laptop: status, stdout, lines of stderr."""
    laptop = LocalDevices(device="cpu", num_devices=0, num_cores=2, memory_bytes=16 << 30)
    monkeypatch.setattr(machine, "find_machine", lambda device="auto": laptop)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, list[str]]:
        done = typed("launch", *words)
        return done.status, done.out, done.err.splitlines()

    return run


def test_an_empty_folder_shows_the_whole_cluster_command_and_what_was_assumed(fcp: Fcp, tmp_path: Path) -> None:
    status, out, err = fcp("--model", "qwen3vl-8b", "--dry-run")
    assert status == 0
    assert [line for line in err[:7] if not line.startswith("assumed recipe = ")] == snapshot(
        [
            "assumed --plan = plan.parquet (not there yet; make it with: fcp plan lengths.parquet --model qwen3-vl-8b -o plan.parquet)",
            "assumed --cluster = example-8x8 (no accelerator here; name yours, or this-machine for CPU cores)",
            "assumed --ranks = 64 (the cluster example-8x8, one device per rank)",
            "assumed --device = cuda (the plan's cost profile is of example-8x8)",
            "assumed --weights = random (--weights FOLDER, or a checkpoint's folder as --model, starts from one)",
            "assumed --manifest = lengths.parquet (not there yet: 'fcp manifest build' makes it)",
        ]
    )
    commands = [line for line in out.splitlines() if line.startswith("env ")]
    assert len(commands) == 8
    for node, command in enumerate(commands):
        assert "--nproc-per-node=8 --nnodes=8 --rdzv-backend=fcp --rdzv-endpoint=NODE0_ADDRESS:29500" in command
        assert f"--rdzv-conf=rank={node},timeout=" in command
        assert f"--model qwen3vl-8b --run-dir {tmp_path}/runs/qwen3vl-8b-001 --manifest" in command
    assert list(tmp_path.iterdir()) == []


@pytest.mark.lengthy
def test_an_empty_folder_shows_every_target(fcp: Fcp, tmp_path: Path) -> None:
    for words, text in (
        (("--target", "slurm"), "#SBATCH --nodes=8"),
        (("--target", "scripts"), "# ---- hostfile\nnode0\n"),
        (("--image", "fcp:1"), "kind: TrainJob"),
        (("--target", "jobset", "--image", "fcp:1"), "kind: JobSet"),
    ):
        status, out, _ = fcp("--model", "qwen3vl-8b", "--dry-run", *words)
        assert status == 0
        assert text in out
        assert "torch.distributed.run" in out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_eight_nodes_becomes_a_job_of_eight_nodes(fcp: Fcp, tmp_path: Path) -> None:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, num_ranks=64, ranks_per_node=8)
    status, out, err = fcp("--model", "qwen3-tiny", "--target", "slurm", "--device", "npu", "--dry-run", "--json")
    assert status == 0
    document = json.loads(out)
    assert (document["target"], document["num_nodes"], document["processes_per_node"]) == ("slurm", 8, 8)
    (file,) = document["files"]
    assert "#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=npu:8\n" in file["text"]
    assert "export HCCL_CONNECT_TIMEOUT=1200\n" in file["text"]
    assert err[-2] == "8 nodes with 8 processes each"
    assert err[-1].startswith("to submit it by hand, write it with -o DIR: Slurm needs the folder of its log, ")


def test_a_profile_of_ascend_devices_asks_for_npus(fcp: Fcp, tmp_path: Path) -> None:
    plan, manifest = tmp_path / "plan.parquet", write_manifest(tmp_path)
    write_small_plan(plan, manifest, steps=1, cost_profile="model: qwen3-tiny\ncluster: ascend910b-8x8\n")
    _, out, err = fcp("--target", "slurm", "--dry-run")
    assert "assumed --device = npu (the plan's cost profile is of ascend910b-8x8)" in err
    assert "#SBATCH --gres=npu:4" in out


def test_files_are_written_whole_once_and_nothing_is_started(fcp: Fcp, tmp_path: Path) -> None:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, model="qwen3-tiny")
    words = ("--nodes", "2", "--target", "scripts", "--synthetic", "-o", "job")
    status, out, err = fcp(*words)
    assert status == 0 and out.startswith("memory of a device")
    assert err[-1] == "start the job with: bash job/start.sh"
    files = ["hostfile", "launch.json", "node.sh", "start.sh"]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == files
    assert (tmp_path / "job" / "hostfile").read_text() == "node0\nnode1\n"
    assert not (tmp_path / "runs").exists()
    status, _, err = fcp(*words)
    assert status == 1
    assert err[-1] == snapshot("error: job/node.sh is there already; remove it, or choose another folder")


def test_without_sbatch_nothing_is_written(fcp: Fcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, model="qwen3-tiny")
    status, _, err = fcp("--target", "slurm", "--synthetic")
    assert (status, err[-1]) == snapshot(
        (
            1,
            "error: there is no sbatch on this machine; write the script with -o DIR and submit it where Slurm is",
        )
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "slurm", "--node-rank", "1"),
         "--node-rank is for --target local; under slurm every node finds it by itself"),
        (("--image", "x", "--mount", "data"),
         "--mount is 'data'; it must be CLAIM:/path, a persistent volume claim and its mount path"),
        (("--target", "jobset"), "containers need --image: the name of one with fcp, torch and your code"),
        (("--srun-option", "image"),
         "--srun-option 'image' is not one option of srun; give it as --srun-option=--container-image=/images/fcp.sqsh"),
        (("--target", "skypilot", "--mount", "a:/x"), "--mount is for --target slurm or trainjob or jobset, not for skypilot"),
        (("--target", "slurm", "--mount", "/a:/x"), "containers need --image: the name of one with fcp, torch and your code"),
        (("--sbatch-option", "gpu"),
         "--sbatch-option 'gpu' is not one option of sbatch; give it as --sbatch-option=--partition=gpu"),
        (("-o", "job"), "-o writes the files of a cluster job; name one with --target, or see --dry-run"),
        (("--image", "--privileged"), "--image is '--privileged'; it must be the name of an image, as registry/team/fcp:1.0"),
        (("--image", "i", "--mount", "--data:/x"),
         "--mount is '--data:/x'; it must be CLAIM:/path, a persistent volume claim and its mount path"),
        (("--nodes", "3", "--hostfile", "hosts"), "hosts lists 2 hosts, but --nodes is 3"),
        (("--hostfile", "nope"), "cannot read the hostfile nope: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(fcp: Fcp, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    status, out, err = fcp("--model", "qwen3-8b", "--dry-run", *words)
    assert (status, out, err[-1]) == (2, "", f"error: {message}")


def test_a_run_directory_adds_no_line_to_a_script_of_slurm(fcp: Fcp) -> None:
    words = ("--model", "qwen3-8b", "--dry-run", "--target", "slurm", "--run-dir")
    status, out, err = fcp(*words, "runs/a\ntouch evil")
    assert (status, out) == (2, "")
    assert err[-1].endswith("has a control character, which files of a job cannot hold; rename it")
    out = fcp(*words, "runs/a --uid=0")[1]
    (directive,) = [line for line in out.splitlines() if line.startswith("#SBATCH --output=")]
    assert directive.startswith("#SBATCH --output='/")
    assert directive.endswith("/runs/a --uid=0/logs/slurm-%j.log'")


@pytest.mark.parametrize("template", ["", '{% set runtime = "torch-distributed" %}\n'])
def test_a_mount_that_a_runtime_of_the_site_does_not_get_is_said_not_to_be_added(
    fcp: Fcp, tmp_path: Path, template: str
) -> None:
    (tmp_path / "site.yaml.j2").write_text('{% extends "trainjob.yaml.j2" %}\n' + template)
    where = ("--target", "trainjob", "--template", "site.yaml.j2", "--image", "fcp:1", "--mount", "shared:/shared")
    status, out, err = fcp("--model", "qwen3vl-8b", "--run-dir", "/shared/run", *where, "--dry-run")
    assert status == 0
    assert ("claimName" in out) == (not template)
    line = "warning: --mount adds no volume to a ClusterTrainingRuntime: see that the site's mounts /shared"
    assert (line in err) == bool(template)
