"""LLaMA-Factory, unmodified: the losses, norms and weights of `llamafactory-cli train` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runtime.loops.framework_jobs import (
    GLOBAL_BATCH,
    RANKS,
    alone,
    differences,
    fcp,
    planned,
    read_checkpoint,
    write_conversations,
    write_model,
    write_plan,
)

pytestmark = pytest.mark.loops
pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed (make test-loops)")
_MODULE = ("-m", "llamafactory.cli", "train")
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the data, and a plan for its tokens."""
    found = tmp_path_factory.mktemp("llama-factory")
    write_model(found / "model")
    write_conversations(found / "rows.jsonl")
    rows = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _TAGS}
    (found / "dataset_info.json").write_text(json.dumps({"rows": rows}))
    alone(*_MODULE, settings(found, "tokens", tokenized_path="tokens"), folder=found, ranks=1)
    write_plan(found, "tokens/train", "--kind", "arrow", "--column", "input_ids")
    return found


def settings(folder: Path, name: str, **changes: Any) -> str:
    given = {
        "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows",
        "dataset_dir": ".", "template": "qwen3_nothink", "cutoff_len": 512, "output_dir": name, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": GLOBAL_BATCH // RANKS,
        "learning_rate": 1e-3, "num_train_epochs": 1, "use_cpu": True, "report_to": "none", "disable_shuffling": True,
        "seed": 1,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return f"{name}.yaml"


def test_full_fine_tuning_with_evaluation_is_that_of_the_framework_alone(folder: Path) -> None:
    evaluated = {"eval_dataset": "rows", "eval_strategy": "steps", "eval_steps": 1}
    alone(*_MODULE, settings(folder, "full-alone", **evaluated), folder=folder)
    written = planned("llamafactory-cli", "train", settings(folder, "full", **evaluated), folder=folder)
    assert "CustomSeq2SeqTrainer, rows in the plan's order" in written
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("full", "full-alone"))
    assert len(found.logged("eval_loss")) == 3
    assert max(differences(found, expected).values()) <= 2e-6
    fcp("report", "run", "-o", "report.html", folder=folder)
    assert (folder / "report.html").stat().st_size > 10_000


def test_lora_is_that_of_the_framework_alone(folder: Path) -> None:
    lora = {"finetuning_type": "lora", "lora_rank": 4}
    alone(*_MODULE, settings(folder, "lora-alone", **lora), folder=folder)
    planned("llamafactory-cli", "train", settings(folder, "lora", **lora), folder=folder)
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("lora", "lora-alone"))
    assert max(differences(found, expected).values()) <= 2e-6


def test_its_packing_is_replaced_by_the_plan_with_a_line(folder: Path) -> None:
    written = planned("llamafactory-cli", "train", settings(folder, "packed", neat_packing=True), folder=folder)
    assert "fcp: LLaMA-Factory's neat_packing is off: the plan packs" in written
    alone(*_MODULE, settings(folder, "unpacked"), folder=folder)
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("packed", "unpacked"))
    assert max(differences(found, expected).values()) <= 2e-6
