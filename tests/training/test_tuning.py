"""Adapters and frozen weights: four gloo ranks learn what one process of transformers and peft learns."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from safetensors.torch import load_file

from tests.runs.records import read_metrics
from tests.runtime.launch import torchrun
from tests.training.tuning_cases import (
    CASES,
    EVALUATED,
    EVALUATED_EVERY,
    FULL,
    NUM_RANKS,
    SAVED_STEPS,
    STEPS,
    Case,
    evaluate_alone,
    train_alone,
    write_inputs,
)

pytestmark = [
    pytest.mark.hf,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft asks for it
]

# Bucket of lengths -> loss per token, and tokens.
HeldOut = dict[int, tuple[float, int]]
_folders: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    while _folders:
        shutil.rmtree(_folders.pop())
    job.cache_clear()
    alone.cache_clear()


@cache
def job(*names: str) -> Path:
    """The folder of a job that trained cases of these names."""
    folder = Path(tempfile.mkdtemp())
    _folders.append(folder)
    write_inputs(folder)
    torchrun("-m", "tests.training.workers.tuning_worker", str(folder), *names, num_ranks=NUM_RANKS)
    return folder


@cache
def alone(folder: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor], dict[int, HeldOut]]:
    """What one process makes of a case: losses, trained weights and, of the evaluated ones, losses of held-out rows by step."""
    case, held_out = {**CASES, **FULL}[name], dict[int, HeldOut]()

    def after(step: int, model: Any) -> None:
        if name in EVALUATED and ((step + 1) % EVALUATED_EVERY == 0 or step + 1 == STEPS):
            held_out[step] = evaluate_alone(folder, case, model)

    return *train_alone(folder, case, after), held_out


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if line["kind"] == "step"]


def check(folder: Path, name: str, case: Case) -> None:
    """Losses of every step, and the export, which libraries load bit for bit."""
    losses, weights, _ = alone(folder, name)
    assert len(losses) == STEPS
    assert losses_of(folder / "runs" / name) == pytest.approx(losses, rel=1e-12)
    exported = reloaded(folder, name, case)
    assert weights.keys() <= exported.keys()
    for tensor_name, tensor in weights.items():
        torch.testing.assert_close(exported[tensor_name], tensor, rtol=0, atol=1e-11, msg=tensor_name)


def reloaded(folder: Path, name: str, case: Case) -> dict[str, torch.Tensor]:
    """The parameters of an export as libraries load it; adapters are compared with what the file holds."""
    import peft
    import transformers

    kind = "AutoModelForImageTextToText" if case.family == "qwen3_vl" else "AutoModelForCausalLM"
    family: Any = getattr(transformers, kind)
    export = folder / "runs" / name / "model"
    if not case.lora:
        return dict(family.from_pretrained(export, dtype="auto").named_parameters())
    base = family.from_pretrained(folder / case.family, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, export)
    stored, found = load_file(export / "adapter_model.safetensors"), peft.get_peft_model_state_dict(model)
    assert stored.keys() == found.keys()
    assert all(torch.equal(stored[name], found[name]) for name in stored)
    assert not (export / "config.json").exists()
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_a_part_as_one_process_does_and_export_it(name: str) -> None:
    check(job(*CASES), name, CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_every_model_trains_every_part_under_every_stage(name: str) -> None:
    check(job(*FULL), name, FULL[name])


def test_adapters_resume_bit_for_bit_from_checkpoints_without_frozen_weights() -> None:
    runs = job(*CASES) / "runs"
    whole, resumed = (losses_of(runs / name) for name in ("adapters, 2", "adapters, 2, resumed"))
    assert resumed == whole
    exported = [
        load_file(runs / name / "model" / "adapter_model.safetensors")
        for name in ("adapters, 2", "adapters, 2, resumed")
    ]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    saved = runs / "adapters, 2" / "checkpoints" / f"step-{SAVED_STEPS:08d}"
    names = {name for path in saved.glob("state-*") for name in load_file(path) if name.startswith("model/")}
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_changes_no_bit_of_training(name: str) -> None:
    runs = job(*CASES) / "runs"
    plain, evaluated = (runs / one for one in (name, f"{name}, evaluated"))
    assert losses_of(evaluated) == losses_of(plain)
    for file in (plain / "model").glob("*.safetensors"):
        before, after = load_file(file), load_file(evaluated / "model" / file.name)
        assert all(torch.equal(before[one], after[one]) for one in before | after)


@pytest.mark.parametrize("name", EVALUATED)
def test_losses_of_held_out_rows_are_those_of_one_process(name: str) -> None:
    folder = job(*CASES)
    _, _, expected = alone(folder, name)
    records = [
        line
        for line in read_metrics(folder / "runs" / f"{name}, evaluated" / "metrics.jsonl")
        if line["kind"] == "eval"
    ]
    assert [record["step"] for record in records] == list(expected) == [1, 3, 4]
    for record in records:
        buckets = expected[record["step"]]
        found = {one["up_to_tokens"]: (one["loss"], one["tokens"]) for one in record["buckets"]}
        assert found == {bucket: (pytest.approx(loss, rel=1e-12), tokens) for bucket, (loss, tokens) in buckets.items()}
        tokens = sum(tokens for _, tokens in buckets.values())
        mean = sum(loss * own for loss, own in buckets.values()) / tokens
        assert (record["loss"], record["tokens"]) == (pytest.approx(mean, rel=1e-12), tokens)
        assert len(buckets) >= 2


NOWHERE = snapshot(
    {
        "no such weight": "--freeze: 'visul.*' is the name of no weight; similar are 'model.*', 'embed_tokens.*', 'layers.*'",
        "misspelt weight": "--freeze: 'visul.*' is the name of no weight; similar are 'visual.*'",
        "nothing left": "--freeze * leaves nothing to train; remove some of its patterns",
        "no such layer": "--lora: 'query' is not a linear layer of the model; it has q_proj, up_proj",
    }
)


@pytest.mark.parametrize("name", ["no such weight", "misspelt weight", "nothing left", "no such layer"])
def test_names_that_are_nowhere_in_the_model_are_one_line(name: str) -> None:
    assert (job(*CASES) / f"{name}.txt").read_text() == NOWHERE[name]
