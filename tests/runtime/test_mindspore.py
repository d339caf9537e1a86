"""MindSpore under a plan, started by real msrun, against one process of another framework."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.cursor import orders_of_rank
from tests.patience import PATIENCE_SECONDS
from tests.runs.records import read_metrics
from tests.runtime.mindspore_model import HEAD_DIM, initial_weights, layers_of, tokens_of
from tests.runtime.plans import Row, write_plan
from tests.runtime.reference import packed_attention
from tests.training.small_runs import fcp_command

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("mindspore") is None, reason="mindspore is not installed: make test-msrun"
    ),
]

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "runtime" / "workers" / "mindspore_worker.py"

# Groups of {3,1}, {1,3}, {2,2} and {4} ranks, and groups that overlap and leave a rank idle. Packs have sequences that
# no degree divides, of fewer tokens than there are chunks, and of fewer than there are members.
STEPS = [
    [Row((0, 1, 2), (37, 5, 1)), Row((3,), (13,))],
    [Row((0,), (7,)), Row((1, 2, 3), (50, 3))],
    [Row((0, 3), (29, 11)), Row((1, 2), (1, 2, 3))],
    [Row((0, 1, 2, 3), (101, 6))],
    [Row((0, 3), (8,)), Row((0, 1, 3), (2,)), Row((1, 3), (9, 31)), Row((2,))],
]
NUM_RANKS = 4


def command(plan: Path, *words: str) -> list[str]:
    """The worker under `fcp launch`; `words` are options, then what follows the script."""
    options = ("--launcher", "msrun", "--device", "cpu", "--plan", str(plan), "--run-dir", str(plan.parent / "run"))
    return fcp_command("launch", *options, *words)


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **changed}


def launch(plan: Path, result: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    """Four ranks on one node, to the end of the job."""
    return subprocess.run(
        command(plan, "--", str(WORKER), str(result)),
        cwd=ROOT,
        env=environment(**changed),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("mindspore") / "plan.parquet", STEPS, num_ranks=NUM_RANKS)


@pytest.fixture(scope="module")
def found(plan: Path) -> dict[str, Any]:
    """Loss and gradients of every step, as rank 0 of the job saved them."""
    done = launch(plan, plan.parent / "found.npz")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return load(plan.parent / "found.npz")


def load(result: Path) -> dict[str, Any]:
    with np.load(result) as saved:
        return dict(saved)


def in_one_process(plan: Path) -> Iterator[tuple[int, float, dict[str, Tensor]]]:
    """Step, loss and gradients of every global batch, in fp64, sequence by sequence."""
    weights = {name: torch.tensor(values).double().requires_grad_() for name, values in initial_weights().items()}
    for step in PlanReader(plan).steps():
        total = torch.zeros((), dtype=torch.float64)
        for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
            total = total + loss_sum(weights, torch.tensor(tokens_of(row)[:length]))
        loss = total / int(step.lengths.sum() - len(step.lengths))
        grads = torch.autograd.grad(loss, list(weights.values()))
        yield step.step, float(loss.detach()), dict(zip(weights, grads, strict=True))


def loss_sum(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    hidden = weights["tokens"][tokens] + weights["positions"][: len(tokens)]
    for q, k, v, o in layers_of(weights):
        heads = [(hidden @ weight).reshape(len(tokens), -1, HEAD_DIM) for weight in (q, k, v)]
        hidden = hidden + (packed_attention(heads[0], heads[1], heads[2], (len(tokens),)).flatten(1) @ o).tanh()
    logits = hidden @ weights["tokens"].T
    return functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def worst_gradient_error(plan: Path, found: dict[str, Any]) -> float:
    """Largest difference of a gradient, as a share of the largest gradient of the same weight; losses are compared."""
    errors = []
    for step, loss, grads in in_one_process(plan):
        assert found[f"{step}/loss"] == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            difference = (torch.from_numpy(found[f"{step}/{name}"]) - grad).abs().max()
            errors.append(float(difference / grad.abs().max()))
    assert len(errors) == len(STEPS) * len(initial_weights())
    return max(errors)


def test_loss_and_gradients_are_those_of_one_process(plan: Path, found: dict[str, Any]) -> None:
    """fp32 under the plan, fp64 in one process."""
    worst = worst_gradient_error(plan, found)
    print(f"worst gradient error: {worst:.1e} of the largest gradient")
    assert worst <= 1e-5


def test_it_needs_no_torch(found: dict[str, Any]) -> None:
    assert not found["imported_torch"]


def test_rank_0_writes_the_metrics_of_every_step(plan: Path, found: dict[str, Any]) -> None:
    run, *steps = read_metrics(plan.parent / "run" / "metrics.jsonl")
    assert (run["num_ranks"], run["device"], run["first_step"], run["steps"]) == (NUM_RANKS, "cpu", 0, len(STEPS))
    assert run["mindspore"] and Path(run["program"]).name == WORKER.name
    for number, (step, planned) in enumerate(zip(steps, PlanReader(plan).steps(), strict=True)):
        assert (step["step"], step["tokens"], step["warm_up"]) == (number, int(planned.tokens.sum()), number == 0)
        assert step["loss"] == pytest.approx(float(found[f"{number}/loss"]), rel=1e-6)
        for rank, measured in enumerate(step["ranks"]):
            orders = orders_of_rank(planned, rank).tolist()
            assert [timing["order"] for timing in measured["micro_batches"]] == orders
            assert 0.0 < measured["busy_seconds"] < 1.1 * step["seconds"]
            assert measured["peak_memory_bytes"] > 1 << 20


def test_a_rank_with_another_plan_stops_the_job(plan: Path, tmp_path: Path) -> None:
    other = write_plan(tmp_path / "other.parquet", STEPS[:2], num_ranks=NUM_RANKS)
    done = launch(plan, tmp_path / "found.npz", PLAN_OF_RANK_2=str(other))
    end = time.time()
    assert done.returncode == 1
    assert f"error: rank 2 has another plan than rank 0 under {plan}" in done.stderr
    *_, log = sorted(plan.parent.glob("run/logs/*/worker_2.log"))
    assert end - log.stat().st_mtime < 60, "msrun waited for its scheduler"
    assert not (tmp_path / "found.npz").exists()


@pytest.fixture
def two_networks() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that reach each other as 10.77.0.1 and 10.77.0.2: two machines, to msrun."""
    names = ("fcp-test-a", "fcp-test-b")
    ends = ("fcp-a", "fcp-b")
    setup = [f"netns add {name}" for name in names]
    setup += [f"link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}"]
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        setup += [f"-n {name} addr add 10.77.0.{number}/24 dev {end}"]
        setup += [f"-n {name} link set {link} up" for link in ("lo", end)]
    try:
        for line in setup:
            try:
                subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"network namespaces need root: ip {line}: {getattr(error, 'stderr', '') or error}".strip())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_nodes_share_one_scheduler(two_networks: tuple[str, str], plan: Path, tmp_path: Path) -> None:
    """Unlike two launches in one network, where each would start its own."""
    result = tmp_path / "found.npz"
    where = ("--nodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29810")
    jobs = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                *command(plan, *where, f"--node-rank={node}", "--", str(WORKER), str(result)),
            ],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, name in enumerate(two_networks)
    ]
    said = [job.communicate(timeout=PATIENCE_SECONDS)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert worst_gradient_error(plan, load(result)) <= 1e-5
    assert len(list(plan.parent.glob("run/logs/*-node*/scheduler.log"))) == 1
