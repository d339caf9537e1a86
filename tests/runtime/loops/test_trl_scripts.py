"""TRL's command, unmodified: the losses, norms and weights of `trl sft` alone."""

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
from tests.runtime.loops.frameworks import write_pairs

pytestmark = pytest.mark.loops
pytest.importorskip("trl.scripts.sft", reason="TRL is not installed (make test-loops)")


def options(name: str, *changes: str) -> tuple[str, ...]:
    given = {
        "model_name_or_path": "model", "dataset_name": "rows", "output_dir": name, "logging_steps": "1",
        "save_strategy": "steps", "save_steps": "1", "per_device_train_batch_size": str(GLOBAL_BATCH // RANKS),
        "learning_rate": "1e-3", "num_train_epochs": "1", "train_sampling_strategy": "sequential",
        "report_to": "none", "max_length": "512", "dtype": "float32", "bf16": "false",
        "gradient_checkpointing": "false",
    }  # fmt: skip
    return (*(word for key, value in given.items() for word in (f"--{key}", value)), "--use_cpu", *changes)


def test_preferences_without_a_plan_are_those_of_the_command_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_pairs(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "pairs" / "lists.jsonl").rename(tmp_path / "rows" / "train.jsonl")
    alone("-m", "trl.scripts.dpo", *options("alone"), folder=tmp_path)
    started = ("launch", "--ranks", str(RANKS), "--device", "cpu", "--run-dir", "run", "--", "trl", "dpo")
    written = fcp(*started, *options("full"), folder=tmp_path)
    assert "fcp: no plan was given: DPOTrainer trains 24 rows" in written
    found, expected = (read_checkpoint(tmp_path / name / "checkpoint-3") for name in ("full", "alone"))
    assert max(differences(found, expected).values()) <= 5e-6
    assert found.logged("rewards/margins") == pytest.approx(expected.logged("rewards/margins"), rel=1e-4, abs=1e-6)


def test_fine_tuning_is_that_of_the_command_alone_and_its_packing_is_replaced(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    write_conversations(tmp_path / "rows" / "train.jsonl")
    write_plan(tmp_path, "rows/train.jsonl", "--tokenizer", "model")
    alone("-m", "trl.scripts.sft", *options("alone"), folder=tmp_path)
    written = planned("trl", "sft", *options("full"), "--packing", folder=tmp_path)
    assert "fcp: TRL's packing is off: the plan packs" in written
    assert "SFTTrainer, rows in the plan's order" in written
    found, expected = (read_checkpoint(tmp_path / name / "checkpoint-3") for name in ("full", "alone"))
    assert max(differences(found, expected).values()) <= 2e-6
    assert found.logged("num_tokens") == expected.logged("num_tokens")
    assert found.logged("mean_token_accuracy") == pytest.approx(expected.logged("mean_token_accuracy"))
    fcp("report", "run", "-o", "report.html", folder=tmp_path)

    written = planned("trl", "sft", *options("full", "--resume_from_checkpoint", "full/checkpoint-2"), folder=tmp_path)
    assert "from step 2 of 3" in written
    assert max(differences(read_checkpoint(tmp_path / "full" / "checkpoint-3"), expected).values()) <= 2e-6
