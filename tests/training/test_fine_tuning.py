"""Fine-tuning: a checkpoint and conversations in, the losses of one unmodified model, a checkpoint out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from fcp_cli.manifest.tokens import open_tokens
from fcp_cli.models.weights import INDEX
from fcp_cli.plan.file import PlanReader
from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights import model_config
from tests.manifest.chat_checkpoint import write_checkpoint
from tests.manifest.datasets import build, write_jsonl
from tests.runs.records import read_metrics
from tests.training.small_runs import run_fcp, write_small_plan

pytestmark = [pytest.mark.distributed, pytest.mark.hf, pytest.mark.processes, pytest.mark.torch]

STEPS = 3
LEARNING_RATE = 1e-3


def write_data(folder: Path) -> None:
    """A checkpoint of a tiny model with its tokenizer, conversations, their manifest and a plan."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = model_config("qwen3-tiny")
    config.vocab_size = 320
    family: Any = AutoModelForCausalLM
    model = family.from_config(config)
    model.save_pretrained(folder / "checkpoint", max_shard_size="300KB")
    add_tensor(folder / "checkpoint", "mtp.head.weight")
    write_checkpoint(folder / "checkpoint")
    records = [
        {
            "messages": [
                {"role": "user", "content": "word " * (1 + number % 7)},
                # Every fifth conversation has nothing to learn.
                *([{"role": "assistant", "content": "other " * (number % 11)}] if number % 5 else []),
            ]
        }
        for number in range(24)
    ]
    data = write_jsonl(folder / "chat.jsonl", records)
    build(data, folder / "lengths.parquet", tokenizer=str(folder / "checkpoint"))
    write_small_plan(folder / "plan.parquet", folder / "lengths.parquet", steps=STEPS)


def add_tensor(checkpoint: Path, name: str) -> None:
    """One more tensor of a sharded checkpoint, for which its model has no place."""
    save_file({name: torch.ones(3)}, checkpoint / "more.safetensors")
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"][name] = "more.safetensors"
    (checkpoint / INDEX).write_text(json.dumps(index))


def losses_of_one_process(folder: Path) -> tuple[list[float], Any]:
    """Train the checkpoint with transformers' own attention, one sequence after another; return losses and model."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float64)
    settings = TrainSettings(
        plan=folder / "plan.parquet", model="", run_dir=folder, learning_rate=LEARNING_RATE, warmup_steps=1
    )
    optimizer = make_optimizer(list(model.parameters()), settings)
    rows: Any = open_tokens(folder / "lengths.parquet")
    losses = []
    for number, step in enumerate(PlanReader(folder / "plan.parquet").steps()):
        batch = [rows(int(row)) for row in step.sequences]
        learned = sum(int((labels[1:] != -100).sum()) for _, labels in batch)
        total = 0.0
        for tokens, labels in batch:
            logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0, :-1]
            loss = functional.cross_entropy(logits, torch.from_numpy(labels)[1:], reduction="sum") / learned
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        clip_gradients(list(model.parameters()), settings.max_grad_norm)
        set_learning_rate(optimizer, learning_rate_at(number, settings=settings, plan_steps=STEPS))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def test_ranks_learn_what_one_process_learns_and_export_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path
    write_data(folder)
    words = ("--learning-rate", str(LEARNING_RATE), "--warmup-steps", "1", "--precision", "fp64", "--zero", "2")
    ended = run_fcp(
        "launch", "--model", "checkpoint", *words, "--checkpoint-every", "1", "--run-dir", "run", folder=folder
    )
    assert ended.returncode == 0, ended.stderr
    logs = "".join(path.read_text() for path in sorted((folder / "run" / "logs").rglob("*")) if path.is_file())
    assert "checkpoint has no place for 1 tensor of" in ended.stderr + logs
    assert "which are neither trained nor exported: mtp.head.weight" in ended.stderr + logs
    expected, alone = losses_of_one_process(folder)
    found = losses_of(folder / "run")
    assert found == pytest.approx(expected, rel=1e-12)
    family: Any = AutoModelForCausalLM
    exported = family.from_pretrained(folder / "run" / "model", dtype="auto")
    assert exported.dtype == torch.float64
    torch.testing.assert_close(dict(exported.state_dict()), dict(alone.state_dict()), rtol=0, atol=1e-12)
    assert (folder / "run" / "model" / "tokenizer.json").is_file()
    go_on_without_the_checkpoint(folder, found)


def go_on_without_the_checkpoint(folder: Path, losses: list[float]) -> None:
    """The last step again, when the folder that the run began from is gone: same loss, same export, same tokenizer."""
    shutil.rmtree(folder / "checkpoint")
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    before = {path.name: path.read_bytes() for path in (folder / "run" / "model").iterdir()}
    shutil.rmtree(folder / "run" / "model")
    ended = run_fcp("launch", "--run-dir", "run", "--resume", folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert losses_of(folder / "run") == losses
    assert {path.name: path.read_bytes() for path in (folder / "run" / "model").iterdir()} == before


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if line["kind"] == "step"]
