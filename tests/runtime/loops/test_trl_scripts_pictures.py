"""SFTTrainer of TRL on conversations with pictures: the losses, norms, weights and accuracies of the script alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.loops.framework_jobs import GLOBAL_BATCH, RANKS, alone, differences, fcp, planned, read_checkpoint
from tests.training.picture_runs import write_conversations, write_vision_checkpoint

pytestmark = pytest.mark.loops
pytest.importorskip("trl", reason="trl is not installed (make test-loops)")
pytest.importorskip("PIL", reason="Pillow is not installed (make test-loops)")

SCRIPT = str(Path(__file__).with_name("sft_pictures.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL, conversations of none to three pictures, and a plan in which the longer rows need both ranks."""
    found = tmp_path_factory.mktemp("trl-pictures")
    write_vision_checkpoint(found / "checkpoint", "qwen3_vl")
    write_conversations(found)
    built = ("--kind", "media", "--processor", "checkpoint", "-o", "lengths.parquet")
    fcp("manifest", "build", "data.jsonl", *built, folder=found)
    fcp(
        *("plan", "lengths.parquet", "--model", "./checkpoint", "--ranks", str(RANKS), "--tokens-per-rank", "150"),
        *("--global-batch-size", str(GLOBAL_BATCH), "--no-shuffle", "-o", "plan.parquet"),
        folder=found,
    )
    return found


def test_fine_tuning_on_pictures_is_that_of_the_script_alone(folder: Path) -> None:
    alone(SCRIPT, "qwen3_vl", "alone", folder=folder)
    assert "SFTTrainer, rows in the plan's order" in planned(SCRIPT, "qwen3_vl", "planned", folder=folder)
    found, expected = (read_checkpoint(folder / name / "checkpoint-3") for name in ("planned", "alone"))
    assert max(differences(found, expected).values()) <= 2e-6
    for name in ("mean_token_accuracy", "num_tokens", "entropy"):
        assert found.logged(name) == pytest.approx(expected.logged(name), rel=1e-6)
