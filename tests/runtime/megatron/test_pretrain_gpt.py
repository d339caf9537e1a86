"""Megatron-LM's own `pretrain_gpt.py`, with its `megatron.training`, beside itself under a plan."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.patience import wait_until
from tests.planning.examples import PROFILE
from tests.runtime.launch import ROOT, torchrun
from tests.training.small_runs import fcp_command, run_fcp

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

NUM_RANKS = 4
STEPS, GLOBAL_BATCH_SIZE = 12, 8
TOKENS_PER_SAMPLE = 64
CONVERSATIONS = ROOT / "tests" / "runtime" / "megatron" / "conversations.py"
OWN_DATA = ROOT / "tests" / "runtime" / "megatron" / "own_data.py"

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 1"
)
TRAINING = (
    f"--micro-batch-size 1 --global-batch-size {GLOBAL_BATCH_SIZE} --train-iters {STEPS} --lr 0.01 --min-lr 0.001 "
    "--lr-decay-style cosine --clip-grad 1.0 --log-interval 1"
)
# The last two are what a plan asks for.
NUMBERS = "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss"
ON_CPU = (
    "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion"
)
ARGUMENTS = f"{MODEL} {TRAINING} {NUMBERS} {ON_CPU}".split()
MOCK_DATA = (
    f"--mock-data --split 1,0,0 --seq-length {TOKENS_PER_SAMPLE} --max-position-embeddings 128 --num-workers 0 "
    "--eval-iters 0 --eval-interval 100 --ckpt-format torch_dist"
)
HALTING = "--save checkpoint --save-interval 6 --exit-interval 6"
# What else users turn on: workers of the data loader, evaluation, recomputation, the distributed optimizer.
BUSY = (
    "--seq-length 128 --max-position-embeddings 128 --num-workers 2 --eval-iters 1 --eval-interval 5 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)

PACKED = "--seq-length 128 --max-position-embeddings 128 --num-workers 0 --eval-iters 0 --eval-interval 100"


@pytest.fixture(scope="module")
def source() -> Path:
    named = os.environ.get("FCP_MEGATRON_LM_SOURCE")
    if not named:
        pytest.skip(
            "opt-in: FCP_MEGATRON_LM_SOURCE names a checkout of Megatron-LM, core_v0.16.1 or core_v0.19.0, "
            "for which 'pip install megatron-core==0.16.1 six', or 0.19.0, has been run"
        )
    return Path(named)


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs run; ranks that start with it find the CPU's side of what Megatron calls."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        'import os\nif "RANK" in os.environ:\n    import tests.runtime.megatron.training_shim\n'
    )
    return folder


def environment(folder: Path, records: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FCP_TEST_RECORDS": str(folder / f"{records}.jsonl")}


def train(folder: Path, records: str, script: Path, *arguments: str) -> None:
    """Without fcp."""
    given = [str(script), *ARGUMENTS, *arguments]
    torchrun(*given, num_ranks=NUM_RANKS, **environment(folder, records))


def launch(folder: Path, records: str, plan: str, script: Path, *arguments: str) -> str:
    """Under a plan; what it says on standard error."""
    job = ("launch", "--plan", plan, "--", str(script), *ARGUMENTS, *arguments)
    done = run_fcp(*job, folder=folder, **environment(folder, records))
    assert done.returncode == 0, done.stderr
    return str(done.stderr)


def write_plan(folder: Path, name: str, lengths: list[int], *more: str, sync: str = "iteration") -> None:
    """In the data set's own order, in which the script reads it."""
    pq.write_table(pa.table({"length": lengths}), folder / f"{name}.parquet")
    options = ("--tokens-per-rank", "40", *(more or ("--ranks", "4", "--ranks-per-node", "4")))
    making = ("--solver", "fcp-paper", "--sync", sync, "--no-shuffle")  # needs nothing compiled
    batch = ("--global-batch-size", str(GLOBAL_BATCH_SIZE))
    output = ("-o", f"{name}-plan.parquet")
    done = run_fcp("plan", f"{name}.parquet", *options, *batch, *making, *output, folder=folder)
    assert done.returncode == 0, done.stderr


def recorded(folder: Path, name: str) -> dict[str, np.ndarray]:
    records: list[Any] = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return {key: np.array([record[key] for record in records]) for key in ("loss", "grad_norm")}


def assert_same(folder: Path, found: str, expected: str, *, steps: slice = slice(None)) -> None:
    ours, theirs = recorded(folder, found), recorded(folder, expected)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(ours[key], theirs[key][steps], rtol=1e-6)


def test_pretrain_gpt_resumed_from_its_checkpoint_trains_as_without_fcp(folder: Path, source: Path) -> None:
    script, arguments = source / "pretrain_gpt.py", MOCK_DATA.split()
    write_plan(folder, "fixed", [TOKENS_PER_SAMPLE] * (STEPS * GLOBAL_BATCH_SIZE))
    train(folder, "alone", script, *arguments)
    said = launch(folder, "first", "fixed-plan.parquet", script, *arguments, *HALTING.split())
    assert "from step 0 of 12, 4 ranks, sync iteration" in said and "; probe: " in said
    said = launch(folder, "second", "fixed-plan.parquet", script, *arguments, "--load", "checkpoint")
    assert "from step 6 of 12" in said
    assert_same(folder, "first", "alone", steps=slice(6))
    assert_same(folder, "second", "alone", steps=slice(6, None))
    weights, expected = (np.load(folder / f"{name}.npy") for name in ("second", "alone"))
    assert np.linalg.norm(weights - expected) <= 1e-6 * np.linalg.norm(expected)


def test_pretrain_gpt_stopped_by_sigterm_saves_and_goes_on_from_its_checkpoint(folder: Path, source: Path) -> None:
    """Without --exit-signal-handler, and though it would save only at its end."""
    script, arguments = source / "pretrain_gpt.py", MOCK_DATA.split()
    steps = 200
    write_plan(folder, "long", [TOKENS_PER_SAMPLE] * (steps * GLOBAL_BATCH_SIZE))
    saves = ["--save", "stopped", "--save-interval", "2000", "--train-iters", "200", "--load", "stopped"]
    job = ("launch", "--grace", "200", "--plan", "long-plan.parquet", "--", str(script), *ARGUMENTS, *arguments, *saves)
    records = folder / "stopped.jsonl"
    with subprocess.Popen(
        fcp_command(*job),
        cwd=folder,
        env={**os.environ, **environment(folder, "stopped")},
        stderr=subprocess.PIPE,
        text=True,
    ) as fcp:
        wait_until(lambda: fcp.poll() is not None or (records.exists() and records.read_text().count("\n") >= 2))
        fcp.terminate()
        said = fcp.communicate()[1]
    assert fcp.returncode == 143, said
    assert "stopping at the end of this step; press Ctrl-C again to stop at once" in said
    trained = records.read_text().count("\n")
    assert (folder / "stopped" / "latest_checkpointed_iteration.txt").read_text() == str(trained)
    more = ("--exit-interval", "1", "--train-iters", "200", "--load", "stopped")
    assert f"from step {trained} of {steps}" in launch(
        folder, "resumed", "long-plan.parquet", script, *arguments, *more
    )


def test_its_training_loop_on_data_of_any_lengths_trains_as_without_fcp(folder: Path, source: Path) -> None:
    draw = random.Random(1)
    lengths = [draw.choice([3, 5, 9, 17, 30, 61, 100]) for _ in range(STEPS * GLOBAL_BATCH_SIZE)]
    write_plan(folder, "lengths", lengths)
    arguments = [*BUSY.split(), "--data-path", "lengths.parquet"]
    train(folder, "own data alone", OWN_DATA, *arguments[:-1], str(folder / "lengths.parquet"))
    launch(folder, "own data", "lengths-plan.parquet", OWN_DATA, *arguments)
    assert_same(folder, "own data", "own data alone")


def test_conversations_that_sft_packs_are_trained_as_masked_ones_without_fcp(folder: Path, source: Path) -> None:
    draw = random.Random(2)
    lengths = [draw.choice([9, 17, 30, 61, 100]) for _ in range(STEPS * GLOBAL_BATCH_SIZE)]
    write_plan(folder, "packs", lengths)
    arguments = [*PACKED.split(), "--data-path", str(folder / "packs.parquet")]
    train(folder, "packs alone", CONVERSATIONS, *arguments)
    launch(folder, "packs", "packs-plan.parquet", CONVERSATIONS, *arguments, "--sft")
    assert_same(folder, "packs", "packs alone")


@pytest.mark.parametrize(
    ("kind", "sync", "more"), [("tensor", "iteration", ["--sequence-parallel"]), ("pipeline", "microbatch", [])]
)
def test_its_replicas_of_two_processes_train_as_without_fcp(
    folder: Path, source: Path, kind: str, sync: str, more: list[str]
) -> None:
    """Of tensor-parallel ones the first alone makes a data set, and broadcasts samples of the static length."""
    arguments = [*MOCK_DATA.split(), f"--{kind}-model-parallel-size", "2", *more]
    (folder / "profile.yaml").write_text(PROFILE)
    replicas = ("--profile", "profile.yaml", "--ranks", "2", "--ranks-per-node", "2", f"--{kind}-parallel", "2")
    write_plan(folder, kind, [TOKENS_PER_SAMPLE] * (STEPS * GLOBAL_BATCH_SIZE), *replicas, sync=sync)
    train(folder, f"{kind} alone", source / "pretrain_gpt.py", *arguments)
    launch(folder, f"{kind} planned", f"{kind}-plan.parquet", source / "pretrain_gpt.py", *arguments)
    assert_same(folder, f"{kind} planned", f"{kind} alone")
