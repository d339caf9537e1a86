"""The generated script under a real Slurm: four ranks over two nodes, and everything that ends a job before its time.

Run by `make test-slurm`; both plugins that decide which processes a signal of Slurm reaches.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from fcp_cli.runs.checkpoints import checkpoints
from tests.launching.slurm_cluster import SlurmCluster, running
from tests.patience import wait_until
from tests.ports import unused_port
from tests.training.small_runs import ranks_in, run_fcp, write_manifest, write_small_plan

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LONG = 3000
"""Steps that no job here comes to the end of."""
GRACE_SECONDS = 120.0
"""Much less than the 280 seconds after which all would be ended without a checkpoint."""
_NUMBERS = count()


@pytest.fixture(scope="module", params=["linuxproc", "cgroup"])
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    # A path of pytest's would be too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="fcp-slurm-") as name,
        running(Path(name), request.param, pytest.skip) as it,
    ):
        yield it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=LONG, ranks_per_node=2, model="qwen3-tiny")
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job of `fcp launch --target slurm` that was submitted."""

    slurm: SlurmCluster
    number: int
    run_dir: Path

    @property
    def log(self) -> str:
        path = self.run_dir / "logs" / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        metrics = self.run_dir / "metrics.jsonl"
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # it is written to
        return [line["step"] for line in lines if line["kind"] == "step"]

    @property
    def saved(self) -> list[int]:
        return [int(path.name.rpartition("-")[2]) for path in checkpoints(self.run_dir / "checkpoints")]

    def wait(self, *states: str) -> str:
        return self.slurm.wait_for(self.number, *states)


def submit(slurm: SlurmCluster, folder: Path, *words: str, steps: int = LONG) -> Submitted:
    run_dir = f"run-{next(_NUMBERS)}"
    job = ("--model", "qwen3-tiny", "--device", "cpu", "--nodes", "2", "--steps", str(steps), "--run-dir", run_dir,
           "--checkpoint-every", "0")  # fmt: skip  # a quick machine comes to the hundredth step
    where = ("--target", "slurm", "--master-port", str(unused_port()))
    launched = run_fcp("launch", *job, *where, *words, folder=folder, **slurm.variables)
    found = re.search(r"Submitted batch job (\d+)", launched.stderr)
    assert found is not None, launched.stderr
    return Submitted(slurm=slurm, number=int(found[1]), run_dir=folder / run_dir)


def test_four_ranks_over_two_nodes_train_to_the_end(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder, steps=5)
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    assert job.steps == list(range(5))
    nodes = {path.name for path in (job.run_dir / "logs").iterdir() if path.is_dir()}
    assert nodes == {f"slurm-{job.number}-node{node}" for node in range(2)}


def test_sigterm_to_the_job_saves_a_checkpoint_at_the_end_of_the_step(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder)
    wait_until(lambda: len(job.steps) >= 3)
    slurm.run("scancel", "--batch", "--signal=TERM", str(job.number))
    started = time.monotonic()
    assert job.wait("COMPLETED", "FAILED", "CANCELLED") == "FAILED"
    assert time.monotonic() - started < GRACE_SECONDS
    assert job.saved == [job.steps[-1] + 1]
    assert job.log.count("stopping at the end of this step") == 2  # both nodes say so
    assert ranks_in(folder) == []


def test_the_time_limit_saves_a_checkpoint_before_it_is_reached(slurm: SlurmCluster, folder: Path) -> None:
    # Slurm looks at limits every half minute, and may signal a minute early: two minutes leave time for some steps.
    job = submit(slurm, folder, "--sbatch-option=--time=2", "--sbatch-option=--signal=B:TERM@40")
    assert job.wait("COMPLETED", "FAILED", "TIMEOUT") == "FAILED", job.log
    assert job.saved == [job.steps[-1] + 1]
    assert "error: stopped by SIGTERM" in job.log


def test_scancel_ends_the_job_and_leaves_no_process(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder)
    wait_until(lambda: len(job.steps) >= 2)
    assert len(ranks_in(folder)) >= 4
    slurm.run("scancel", str(job.number))
    assert job.wait("CANCELLED", "FAILED") == "CANCELLED"
    wait_until(lambda: not ranks_in(folder))
    # Both plugins leave the ranks the time that KillWait gives: they save.
    assert job.saved == [job.steps[-1] + 1]


def test_a_requeued_job_continues_from_its_checkpoint_and_adds_to_its_log(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder, "--checkpoint-every", "4", steps=40)
    wait_until(lambda: bool(job.saved))
    before = job.log
    slurm.run("scontrol", "requeue", str(job.number))
    job.wait("PENDING")
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # else after two minutes
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    assert job.log.startswith(before)
    found = re.findall(r"steps (\d+) to 40 of", job.log)
    assert found[0] == "1"
    assert int(found[1]) > 4
    assert job.steps == list(range(40))


def test_a_job_that_is_requeued_before_its_first_checkpoint_begins_again(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder, steps=6)
    job.wait("RUNNING")
    slurm.run("scontrol", "requeue", str(job.number))
    job.wait("PENDING")
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.log
    assert job.steps == list(range(6))


def test_a_node_that_dies_is_named(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder, "--sbatch-option=--no-requeue")
    wait_until(lambda: len(job.steps) >= 2)
    slurm.kill_node("n1")
    try:
        assert job.wait("NODE_FAIL", "FAILED", "COMPLETED") in ("NODE_FAIL", "FAILED")
        assert "Node failure on n1" in job.log
        assert re.search(r"error: rank [01] on \S+ lost its connection to a rank of another node", job.log)
        wait_until(lambda: not ranks_in(folder))
    finally:
        slurm.start_node("n1")
        wait_until(lambda: slurm.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * 2, every_seconds=0.5)


def test_an_srun_that_fails_fails_the_job_with_its_own_words(slurm: SlurmCluster, folder: Path) -> None:
    job = submit(slurm, folder, "--srun-option=--nodelist=no-such-node")
    assert job.wait("COMPLETED", "FAILED") == "FAILED"
    assert "srun: error: Unable to create step for job" in job.log
    assert job.steps == []


def test_a_name_of_node_0_that_does_not_resolve_is_said_within_seconds(slurm: SlurmCluster, folder: Path) -> None:
    template = folder / "wrong.j2"
    text = (Path(__file__).parents[2] / "launchers" / "job.sbatch.j2").read_text()
    template.write_text(text.replace("export MASTER_ADDR\n", "export MASTER_ADDR=no-such-node.invalid\n"))
    job = submit(slurm, folder, "--template", str(template))
    job.wait("RUNNING", "FAILED")
    started = time.monotonic()
    assert job.wait("FAILED", "COMPLETED") == "FAILED"
    assert time.monotonic() - started < GRACE_SECONDS
    assert re.search(
        r"error: node 0: \S+ cannot find node 0 by the name no-such-node\.invalid \(.*\); let the", job.log
    )
