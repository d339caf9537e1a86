"""`fcp launch` as it is typed: what it prints, what it refuses, and a user's own script for real."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli import app
from fcp_cli.errors import RunError
from fcp_cli.launching import machine
from fcp_cli.launching.machine import Machine
from tests.training.small_runs import run_fcp, write_manifest, write_small_plan


@dataclass(frozen=True, kw_only=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.splitlines()[-1]


Fcp = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    manifest = write_manifest(folder)
    write_small_plan(folder / "plan.parquet", manifest, steps=3, model="qwen3-tiny")
    write_small_plan(folder / "plan8.parquet", manifest, steps=1, num_ranks=8)
    write_small_plan(folder / "plan64.parquet", manifest, steps=1, num_ranks=64)
    pq.write_table(pq.read_table(manifest, columns=["length"]).replace_schema_metadata(None), folder / "bare.parquet")
    write_small_plan(folder / "bare_plan.parquet", folder / "bare.parquet", steps=1)
    return folder


@pytest.fixture
def fcp(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fcp:
    """Run `fcp launch ...` in this process, on a machine of two cores."""
    laptop = Machine(device="cpu", num_devices=0, num_cores=2, memory_bytes=16 << 30)
    monkeypatch.setattr(machine, "find_machine", lambda device="auto": laptop)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(folder)

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["fcp", "launch", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
        shown = capsys.readouterr()
        return Result(status=int(ended.value.code or 0), out=shown.out, err=shown.err)

    return run


def test_with_nothing_more_it_says_what_it_assumed(fcp: Fcp, folder: Path) -> None:
    result = fcp("--dry-run")
    assert result.status == 0
    assert result.err.splitlines() == [
        "assumed --model = qwen3-tiny (the plan's cost profile)",
        "assumed --plan = plan.parquet (it is in this folder)",
        "assumed --manifest = lengths.parquet (the plan was made from it)",
    ]
    run_dir = folder / "runs" / "qwen3-tiny-001"
    assert shlex.split(result.out) == [
        "env",
        f"FCP_PLAN={folder}/plan.parquet",
        f"FCP_METRICS={run_dir}/metrics.jsonl",
        f"FCP_RUN_DIR={run_dir}",
        "OMP_NUM_THREADS=1",
        sys.executable,
        *("-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"),
        *("-m", "fcp_cli.training.train", "--plan", f"{folder}/plan.parquet", "--model", "qwen3-tiny"),
        *("--run-dir", str(run_dir), "--manifest", f"{folder}/lengths.parquet"),
    ]
    assert not (folder / "runs").exists()


def test_a_manifest_of_lengths_alone_trains_on_random_tokens_and_says_so(fcp: Fcp) -> None:
    result = fcp("--plan", "bare_plan.parquet", "--model", "qwen3-tiny", "--dry-run")
    assert result.err == "assumed tokens = random (bare.parquet holds lengths only, no source of tokens)\n"
    assert "--manifest" not in result.out


def test_a_plan_beyond_this_machine_prints_a_command_per_node(fcp: Fcp) -> None:
    result = fcp(
        "--plan", "plan64.parquet", "--model", "qwen3-tiny", "--nodes", "2", "--master-addr", "10.0.0.1", "--dry-run",
        "--json",
    )  # fmt: skip
    document = json.loads(result.out)
    assert (document["num_nodes"], document["processes_per_node"], document["num_ranks"]) == (2, 32, 64)
    for node, command in enumerate(document["commands"]):
        assert command["node"] == node
        assert command["argv"][4:7] == ["--nnodes=2", f"--node-rank={node}", "--master-addr=10.0.0.1"]
    assert "one command per node, 32 processes each; all nodes must see" in result.err


def test_a_script_gets_the_job_instead_of_the_trainer(fcp: Fcp, folder: Path) -> None:
    (folder / "mine.py").write_text("")
    result = fcp("--model", "qwen3-tiny", "--dry-run", "--", "mine.py", "--lr", "a b")
    words = shlex.split(result.out)
    assert words[-3:] == ["mine.py", "--lr", "a b"]
    assert "FCP_MODEL=qwen3-tiny" in words
    assert f"FCP_RUN_DIR={folder}/runs/mine-001" in words
    module = shlex.split(fcp("--dry-run", "--", "-m", "my.module", "--flag").out)
    assert module[-3:] == ["-m", "my.module", "--flag"]


def test_a_head_node_without_torch_still_prints_commands(fcp: Fcp, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torch(device: str = "auto") -> Machine:
        raise RunError("torch is not installed here")

    monkeypatch.setattr(machine, "find_machine", no_torch)
    result = fcp("--dry-run")
    assert result.status == 0
    assert "torch is not installed here; the commands are for the nodes that the plan was made for" in result.err
    assert "--nproc-per-node=4" in result.out
    assert fcp().last_line == "error: torch is not installed here"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ("--plan", "plan8.parquet", "--ranks", "4"),
            1,
            "plan8.parquet is for 8 ranks, but --ranks says 4; make a plan for 4 with: "
            "fcp plan lengths.parquet --ranks 4 -o plan8.parquet",
        ),
        (
            ("--plan", "plan64.parquet"),
            1,
            "plan64.parquet needs 64 processes on this machine, which holds 8 (no accelerator, 2 CPU cores (gloo)); "
            "plan for fewer ranks with 'fcp plan lengths.parquet --ranks 8 -o plan64.parquet'",
        ),
        (
            ("--plan", "lengths.parquet"),
            1,
            "lengths.parquet is a manifest, not a plan; make one with 'fcp plan lengths.parquet -o plan.parquet'",
        ),
        (
            ("--plan", "bare.parquet"),
            1,
            "bare.parquet is a Parquet file but not a plan; make one with 'fcp plan MANIFEST -o plan.parquet'",
        ),
        (
            ("--manifest", "bare.parquet", "--plan", "plan8.parquet", "--model", "qwen3-tiny", "--steps", "2"),
            1,
            "--steps is 2, but plan8.parquet ends after 1; plan more with 'fcp plan --epochs', or leave --steps out",
        ),
        (("--model", "qwen3-8b"), 1, "qwen3-8b needs 524 GB for weights, gradients and optimizer on 4 ranks, but this "
         "machine has 17 GB; try --model qwen3-tiny, or launch on accelerators"),
        (("--plan", "plan8.parquet"), 2, "name the model to train with --model, for example --model qwen3-tiny, or "
         "give a script after --"),
        (("--learning-rate", "-1"), 2, "--learning-rate is -1.0; it must be at least 0"),
        (("--resume",), 1, "there is no run in the folder runs to resume; name one with --run-dir"),
        (("--", "nope.py"), 2, "there is no script nope.py"),
        (("--", "--x", "3"), 2, "after -- comes a script or '-m MODULE', not --x; the trainer's options go before --"),
        (("--steps", "2", "--", "x.py"), 2, "--steps is for the bundled trainer; give x.py its own arguments after it"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(fcp: Fcp, words: tuple[str, ...], status: int, message: str) -> None:
    result = fcp(*words)
    assert (result.status, result.last_line) == (status, f"error: {message}")


def test_without_a_plan_the_command_that_makes_one_is_named(
    fcp: Fcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fcp("--model", "qwen3-tiny")
    assert result.status == 1
    assert result.err == (
        "error: there is no plan.parquet here; make one with 'fcp plan MANIFEST -o plan.parquet', or name one with "
        "--plan\n"
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "dataset.parquet").touch()
    assert "make one with 'fcp plan dataset.parquet -o plan.parquet'" in fcp("--model", "qwen3-tiny").err


def test_a_manifest_that_changed_since_the_plan_is_refused(fcp: Fcp, folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [5, 6, 7]}), tmp_path / "other.parquet")
    result = fcp("--manifest", str(tmp_path / "other.parquet"))
    assert "other.parquet is not the manifest that plan.parquet was made from, or it was changed since" in result.err


def test_a_resumed_run_keeps_its_settings_unless_told_otherwise(fcp: Fcp, tmp_path: Path) -> None:
    words = ("--run-dir", str(tmp_path), "--steps", "2", "--learning-rate", "0.01", "--synthetic", "--dry-run")
    (tmp_path / "launch.json").write_text(fcp(*words, "--json").out)
    resumed = shlex.split(fcp("--run-dir", str(tmp_path), "--resume", "--steps", "3", "--dry-run").out)
    trainer = resumed[resumed.index("fcp_cli.training.train") + 1 :]
    assert trainer[4:] == ["--run-dir", str(tmp_path), "--steps", "3", "--learning-rate", "0.01", "--resume"]


def test_a_run_directory_in_use_is_not_overwritten(fcp: Fcp, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious")
    result = fcp("--run-dir", str(tmp_path))
    assert result.last_line == (
        f"error: {tmp_path} already holds a run; continue it with --resume, or choose another --run-dir"
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"


_SCRIPT = """
import os, sys
from fcp_cli.plan.reader import PlanReader
assert PlanReader(os.environ["FCP_PLAN"]).metadata.num_ranks == int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    print("rank 0 was given", sys.argv[1:])
if os.environ["RANK"] == sys.argv[1]:
    sys.exit("I am the one")
"""


@pytest.mark.distributed
def test_a_users_script_runs_on_all_ranks_and_the_rank_that_fails_is_named(folder: Path) -> None:
    (folder / "script.py").write_text(_SCRIPT)
    fine = run_fcp("launch", "--", "script.py", "none", "two words", folder=folder)
    assert (fine.returncode, fine.stdout) == (0, "rank 0 was given ['none', 'two words']\n")
    failed = run_fcp("launch", "--", "script.py", "2", folder=folder)
    assert failed.returncode == 1
    lines = failed.stderr.splitlines()
    assert lines[-2] == "  I am the one"
    assert lines[-1].startswith("error: rank 2 exited with status 1; its whole output is in ")
    assert Path(lines[-1].split(" is in ")[1]).read_text() == "I am the one\n"
