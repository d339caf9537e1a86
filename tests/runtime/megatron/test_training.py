"""An unmodified Megatron script, started by `fcp launch -- train.py`, beside the same script without fcp."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics_reader import open_run
from tests.forked_ranks import shared_by_scripts
from tests.planning.examples import PROFILE
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.plans import Row, write_plan
from tests.training.small_runs import run_fcp

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

MODULE = "tests.runtime.megatron.train"
SCRIPT = ROOT / "tests" / "runtime" / "megatron" / "train.py"
NUM_RANKS = 2  # on four, groups of every shape: test_gradients.py
STEPS = 12
BF16 = 2**-8  # the rounding of one number


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank wrote down."""

    losses: np.ndarray
    grad_norms: np.ndarray
    tokens: list[int]
    weights: np.ndarray


def read(results: Path, rank: int) -> Trained:
    found: Any = json.loads(results.with_suffix(f".{rank}.json").read_text())
    records = found["records"]
    return Trained(
        losses=np.array([record["loss"] for record in records]),
        grad_norms=np.array([record["grad_norm"] for record in records]),
        tokens=[record["tokens"] for record in records],
        weights=np.array(found["weights"]),
    )


def assert_same(found: Trained, expected: Trained, *, first_step: int = 0) -> None:
    np.testing.assert_allclose(found.losses, expected.losses[first_step:], rtol=1e-6)
    np.testing.assert_allclose(found.grad_norms, expected.grad_norms[first_step:], rtol=1e-6)
    assert found.tokens == expected.tokens[first_step:]
    error = np.linalg.norm(found.weights - expected.weights) / np.linalg.norm(expected.weights)
    assert error <= 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest, its plan in the data set's own order, and what the script gives without fcp."""
    folder = tmp_path_factory.mktemp("megatron")
    draw = random.Random(1)
    lengths = [draw.choice([3, 5, 9, 17, 30, 61, 100]) for _ in range(8 * STEPS)]
    pq.write_table(pa.table({"length": lengths}), folder / "lengths.parquet")
    options = ("--ranks", "2", "--ranks-per-node", "2", "--tokens-per-rank", "80", "--global-batch-size", "8")
    solver = ("--solver", "fcp-paper", "--sync", "iteration")  # needs nothing compiled
    planned = run_fcp("plan", "lengths.parquet", *options, *solver, "--no-shuffle", "-o", "plan.parquet", folder=folder)
    assert planned.returncode == 0, planned.stderr
    torchrun("-m", MODULE, str(folder / "lengths.parquet"), str(folder / "alone"), num_ranks=NUM_RANKS)
    return folder


def launch(folder: Path, *arguments: str, plan: str = "plan.parquet", **environment: str) -> Any:
    words = ("launch", "--plan", plan, "--", str(SCRIPT), "lengths.parquet", *arguments)
    return run_fcp(*words, folder=folder, **shared_by_scripts(), **environment)


def measured_losses(folder: Path) -> list[float]:
    """Of the run that was started last; each of its ranks ran what was planned for it."""
    run = open_run(max((folder / "runs").glob("train-*")))
    steps = list(run.steps())
    plans = PlanReader(Path(run.run["plan"])).steps()
    for step, plan in zip(steps, plans, strict=False):
        planned = sorted((rank, row.order) for row in plan.microbatches() for rank in row.ranks)
        assert sorted(zip(step.ranks, step.orders, strict=True)) == planned
    return [step.loss or 0.0 for step in steps]


@pytest.mark.full
def test_losses_gradient_norms_and_weights_are_those_without_fcp_also_from_megatrons_own_checkpoint(
    folder: Path,
) -> None:
    pytest.importorskip("psutil", reason="megatron-core's dist_checkpointing needs psutil: pip install psutil")
    halted = launch(folder, "halted", "--stopped-in", "4", "--save", "checkpoint")  # saves and exits after that step
    assert halted.returncode == 0, halted.stderr
    assert "fcp: following " in halted.stderr and "from step 0 of 12, 2 ranks, sync iteration" in halted.stderr
    assert "; metrics runs/train-001/metrics.jsonl" in halted.stderr.splitlines()[-1]
    alone = read(folder / "alone", 0)
    np.testing.assert_allclose(measured_losses(folder), alone.losses[:5], rtol=1e-6)
    resumed = launch(folder, "resumed", "--load", "checkpoint")
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 5 of 12" in resumed.stderr
    for rank in range(NUM_RANKS):
        found, expected = read(folder / "halted", rank), read(folder / "alone", rank)
        np.testing.assert_allclose(found.losses, expected.losses[:5], rtol=1e-6)
        np.testing.assert_allclose(found.grad_norms, expected.grad_norms[:5], rtol=1e-6)
        assert_same(read(folder / "resumed", rank), expected, first_step=5)


@pytest.mark.full
def test_so_they_are_where_megatron_compiles_what_it_fuses(folder: Path) -> None:
    done = launch(folder, "planned", FCP_TEST_COMPILED="1")  # for longer than 12 steps take
    assert done.returncode == 0, done.stderr
    for rank in range(NUM_RANKS):
        assert_same(read(folder / "planned", rank), read(folder / "alone", rank))
    np.testing.assert_allclose(measured_losses(folder), read(folder / "alone", 0).losses, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sync"), [pytest.param("tensor", "iteration", marks=pytest.mark.full), ("pipeline", "microbatch")]
)
def test_replicas_of_two_processes_start_by_themselves_and_train_to_the_same_losses(
    folder: Path, kind: str, sync: str
) -> None:
    options = ("--ranks", "2", "--ranks-per-node", "2", "--tokens-per-rank", "80", "--global-batch-size", "8")
    making = (f"--{kind}-parallel", "2", "--sync", sync, "--no-shuffle", "--solver", "static", "-o", f"{kind}.parquet")
    (folder / "profile.yaml").write_text(PROFILE)
    planned = run_fcp("plan", "lengths.parquet", "--profile", "profile.yaml", *options, *making, folder=folder)
    assert planned.returncode == 0, planned.stderr
    groups = {row.ranks for step in PlanReader(folder / f"{kind}.parquet").steps() for row in step.microbatches()}
    assert (0, 1) in groups  # replicas share sequences
    done = launch(folder, kind, f"--{kind}-model-parallel-size", "2", "--steps", "6", plan=f"{kind}.parquet")
    assert done.returncode == 0, done.stderr
    assert "starting 4 processes, 2 to a rank of the plan, on this machine" in done.stderr
    assert f"from step 0 of 12, 2 ranks, sync {sync}" in done.stderr and "probe: attention within" in done.stderr
    np.testing.assert_allclose(measured_losses(folder), read(folder / "alone", 0).losses[:6], rtol=1e-6)
    for process in range(4):
        found, expected = read(folder / kind, process), read(folder / "alone", 0)
        np.testing.assert_allclose(found.losses, expected.losses[:6], rtol=1e-6)
        assert found.tokens == expected.tokens[:6]


@pytest.mark.full
@pytest.mark.parametrize("reduction", ["", "--grad-reduce-in-bf16"])
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_the_optimizers_of_bf16_get_the_gradients_that_they_get_without_fcp(
    folder: Path, optimizer: str, reduction: str
) -> None:
    flags = ["--bf16", "--clip-grad", "1.0", *optimizer.split(), *reduction.split()]
    torchrun("-m", MODULE, str(folder / "lengths.parquet"), str(folder / "bf16"), *flags, num_ranks=NUM_RANKS)
    done = launch(folder, "bf16-planned", *flags)
    assert done.returncode == 0, done.stderr
    alone, planned = read(folder / "bf16", 0), read(folder / "bf16-planned", 0)
    assert abs(planned.grad_norms[0] / alone.grad_norms[0] - 1) <= BF16
    np.testing.assert_allclose(planned.losses, alone.losses, rtol=BF16)
    assert np.array_equal(planned.weights, read(folder / "bf16-planned", 1).weights)


@pytest.mark.full  # what stops it and how: test_gradients.py
def test_a_script_with_another_global_batch_ends_the_job_with_one_line(folder: Path) -> None:
    lengths = pq.read_table(folder / "lengths.parquet").column("length").to_pylist()
    rows = [Row([0, 1], lengths[:4])]
    write_plan(folder / "small.parquet", [rows], num_ranks=NUM_RANKS, rows=len(lengths))
    done = launch(folder, "refused", plan="small.parquet")
    assert done.returncode == 1
    # rank 0 says so itself, unless another rank was quicker
    assert done.stderr.splitlines()[-1].endswith(
        ": step 0 of the plan has 4 sequences, but the script trains on 8 (2 ranks x 4 micro-batches of 1); give "
        "it --global-batch-size 8, or plan with the script's"
    )
