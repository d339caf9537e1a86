"""ms-swift, unmodified: the losses, norms and weights of `swift sft` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

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
pytest.importorskip("swift", reason="ms-swift is not installed (make test-loops)")
_MODULE = ("-m", "swift.cli.sft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the data, and a plan for its tokens, by the template of the checkpoint, which ms-swift's is."""
    found = tmp_path_factory.mktemp("ms-swift")
    write_model(found / "model")
    write_conversations(found / "rows.jsonl")
    write_plan(found, "rows.jsonl", "--tokenizer", "model")
    return found


def options(name: str, *changes: str) -> tuple[str, ...]:
    given = {
        "model": "model", "model_type": "qwen3", "template": "qwen3_nothinking", "dataset": "rows.jsonl",
        "output_dir": name, "add_version": "false", "logging_steps": "1", "save_steps": "1", "tuner_type": "full",
        "per_device_train_batch_size": str(GLOBAL_BATCH // RANKS), "gradient_accumulation_steps": "1",
        "learning_rate": "1e-3", "num_train_epochs": "1", "torch_dtype": "float32", "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false", "report_to": "none", "use_cpu": "true", "max_length": "512",
        "split_dataset_ratio": "0", "seed": "1",
    }  # fmt: skip
    return (*(word for key, value in given.items() for word in (f"--{key}", value)), *changes)


def test_full_fine_tuning_with_evaluation_is_that_of_the_framework_alone(folder: Path) -> None:
    evaluated = ("--val_dataset", "rows.jsonl", "--eval_strategy", "steps", "--eval_steps", "1")
    alone(*_MODULE, *options("full-alone", *evaluated), folder=folder)
    written = planned("swift", "sft", *options("full", *evaluated), "--packing", "true", folder=folder)
    assert "fcp: ms-swift's packing is off: the plan packs" in written
    assert "Seq2SeqTrainer, rows in the plan's order" in written
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("full", "full-alone"))
    assert len(found.logged("eval_loss")) == 3
    assert max(differences(found, expected).values()) <= 2e-6
    assert found.logged("token_acc") == expected.logged("token_acc")
    fcp("report", "run", "-o", "report.html", folder=folder)

    resumed = options("resumed", "--resume_from_checkpoint", "full/checkpoint-2", *evaluated)
    assert "from step 2 of 3" in planned("swift", "sft", *resumed, folder=folder)
    assert max(differences(read_checkpoint(folder / "resumed" / "checkpoint-3"), expected).values()) <= 2e-6


def test_lora_is_that_of_the_framework_alone(folder: Path) -> None:
    changes = (
        "--tuner_type",
        "lora",
        "--lora_rank",
        "4",
        "--lora_dropout",
        "0",
        "--target_modules",
        "q_proj",
        "v_proj",
    )
    alone(*_MODULE, *options("lora-alone", *changes), folder=folder)
    planned("swift", "sft", *options("lora", *changes), folder=folder)
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("lora", "lora-alone"))
    assert max(differences(found, expected).values()) <= 2e-6
    assert found.logged("token_acc") == expected.logged("token_acc")
