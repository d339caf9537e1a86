"""LLaMA-Factory on conversations with pictures: the losses, norms and weights of `llamafactory-cli train` alone.

The checkpoint brings its processor as code, as published ones do: transformers' own asks for torchvision, which does
not load beside a PyTorch for CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifest.picture_checkpoint import Family, odd_sizes, picture
from tests.runtime.loops.framework_jobs import (
    GLOBAL_BATCH,
    RANKS,
    ROWS,
    alone,
    differences,
    fcp,
    read_checkpoint,
)
from tests.training.picture_runs import write_vision_checkpoint

pytestmark = pytest.mark.loops
pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed (make test-loops)")
pytest.importorskip("transformers", minversion="5.23", reason="its encoders take no outputs before transformers 5.23")
_MODULE = ("-m", "llamafactory.cli", "train")
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_PROCESSOR = """
from transformers import AutoTokenizer, {base}
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class SmallProcessor({base}):
    @classmethod
    def from_pretrained(cls, folder, **_):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        made = cls(images, tokenizer, None, chat_template=tokenizer.chat_template)
        made.video_processor = images  # LLaMA-Factory wants one; there are no videos
        return made

    def check_argument_for_proper_class(self, name, value):
        return value is None or super().check_argument_for_proper_class(name, value)
"""
_FAMILIES: dict[Family, tuple[str, str]] = {
    "qwen3_vl": ("Qwen3VLProcessor", "qwen3_vl_nothink"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "qwen2_vl"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small checkpoints, and conversations of none to three pictures."""
    found = tmp_path_factory.mktemp("llama-factory-pictures")
    for family, (base, _) in _FAMILIES.items():
        model = write_vision_checkpoint(found / family, family)
        (model / "processing_small.py").write_text(_PROCESSOR.format(base=base))
        automatic = {"AutoProcessor": "processing_small.SmallProcessor"}
        (model / "processor_config.json").write_text(
            json.dumps({"processor_class": "SmallProcessor", "auto_map": automatic})
        )
    sizes, rows = odd_sizes(3 * ROWS, 2), []
    for row in range(ROWS):
        names = [f"{row}-{number}.png" for number in range(row % 4)]
        for number, name in enumerate(names):
            picture(*sizes[3 * row + number], seed=row).save(found / name)
        asked, answered = "<image> and " * len(names) + f"{row}? Say.", "It is " + "so " * (row % 5)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append({"messages": turns, "images": names})
    (found / "rows.json").write_text(json.dumps(rows))
    columns = {"messages": "messages", "images": "images"}
    rows_of = {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": _TAGS}
    (found / "dataset_info.json").write_text(json.dumps({"rows": rows_of}))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("DISABLE_VERSION_CHECK", "1")  # it allows transformers up to 5.6
        yield found


def settings(folder: Path, family: Family, name: str, **changes: Any) -> str:
    given = {
        "model_name_or_path": family, "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows",
        "dataset_dir": ".", "media_dir": ".", "template": _FAMILIES[family][1], "cutoff_len": 1024, "output_dir": name,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "seed": 1, "trust_remote_code": True,
        "per_device_train_batch_size": GLOBAL_BATCH // RANKS, "learning_rate": 1e-3, "num_train_epochs": 1,
        "use_cpu": True, "report_to": "none", "disable_shuffling": True, "disable_gradient_checkpointing": True,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return f"{name}.yaml"


def compare(folder: Path, family: Family, *ways: str, frozen: bool) -> None:
    """Train alone, then in each way: under a plan that is made, or `again` under that plan."""
    own = {"freeze_vision_tower": frozen, "freeze_multi_modal_projector": frozen}
    alone(*_MODULE, settings(folder, family, f"{family}-alone", **own), folder=folder)
    for way in ways:
        name = f"{family}-{way}"
        given = ("--plan", f"run-{family}-made/plan.parquet") if way == "again" else ("--ranks", str(RANKS))
        words = (*given, "--device", "cpu", "--run-dir", f"run-{name}", "--", "llamafactory-cli", "train")
        written = fcp("launch", *words, settings(folder, family, name, **own), folder=folder)
        assert "CustomSeq2SeqTrainer, rows in the plan's order" in written
        assert ("18 rows with pictures" in written) == (way == "made")
        found, expected = (read_checkpoint(folder / one / "checkpoint-3") for one in (name, f"{family}-alone"))
        assert max(differences(found, expected).values()) <= 1e-6


def test_without_a_plan_it_is_that_of_the_framework_alone_and_the_plan_made_repeats_it(folder: Path) -> None:
    compare(folder, "qwen3_vl", "made", "again", frozen=True)


def test_so_it_is_with_the_encoder_trained(folder: Path) -> None:
    compare(folder, "qwen2_5_vl", "made", frozen=False)
