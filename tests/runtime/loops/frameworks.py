"""Frameworks around transformers' Trainer: the lines that users type, and the settings of SFT (axolotl) and of DPO.

axolotl places the models of several ranks on accelerators alone: a plugin of the user's, its own way to be changed, and
accelerate's variable say that these ranks are CPUs. The plugin also seeds the adapters, which axolotl draws unseeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from transformers import AutoTokenizer

from tests.runtime.loops.framework_jobs import GLOBAL_BATCH, RANKS, ROWS

_BATCH = GLOBAL_BATCH // RANKS
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_PLUGIN = """
import torch
from axolotl.integrations.base import BasePlugin

class CpuRanks(BasePlugin):
    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map = {"": "cpu"}

    def pre_lora_load(self, cfg, model):
        torch.manual_seed(cfg.seed)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """A framework as users start it.

    Attributes:
        package: that must be installed.
        typed: words of its command.
        started: module that the command starts on every rank.
        settings: of the run.
        trainer: class that the framework trains with.
        has_file: whether the settings lie in a file.
        source: of the lengths, for `fcp manifest build`.
        logged: further numbers of its log that must be those of the framework alone.
        variables: of the environment, in both runs.
    """

    package: str
    typed: tuple[str, ...]
    started: str
    settings: Mapping[str, Any]
    trainer: str
    has_file: bool = False
    source: tuple[str, ...] = ("rows/train.jsonl", "--tokenizer", "model")
    logged: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, folder: Path, name: str, **changes: Any) -> tuple[str, ...]:
        """Return the arguments of a run that writes into `name`, and write its file of settings."""
        given = {**self.settings, "output_dir": name, **changes}
        if self.has_file:
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
            return (f"{name}.yaml",)
        words: list[str] = []
        for key, value in given.items():
            words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        return tuple(words)


def write_plugin(folder: Path) -> None:
    """Write axolotl's plugin."""
    (folder / "cpu_ranks.py").write_text(_PLUGIN, encoding="utf-8")


def write_pairs(folder: Path) -> None:
    """Write questions, each with an answer that is preferred and one that is not, and the lengths of both together."""
    draw = random.Random(4)

    def text(*sizes: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.choice(sizes)))

    (folder / "pairs").mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    lengths, files = [], {name: (folder / "pairs" / f"{name}.jsonl").open("w") for name in ("lists", "turns", "answer")}
    for _ in range(ROWS):
        asked, chosen, rejected = (
            {"role": role, "content": text(*sizes)}
            for role, sizes in (("user", (5, 40)), ("assistant", (5, 60, 250)), ("assistant", (5, 60, 120)))
        )
        pair = [tokenizer.apply_chat_template([asked, one], tokenize=False) for one in (chosen, rejected)]
        lengths.append(sum(len(tokenizer(one)["input_ids"]) for one in pair))
        forms = {
            "lists": {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]},
            "turns": {"messages": [asked], "chosen": chosen, "rejected": rejected},
            "answer": {"messages": [asked, chosen], "rejected_response": rejected["content"]},
        }
        for name, form in forms.items():
            files[name].write(json.dumps(form) + "\n")
    for file in files.values():
        file.close()
    pq.write_table(pa.table({"length": lengths}), folder / "pairs.parquet")
    columns = {name: name for name in ("messages", "chosen", "rejected")}
    rows = {"file_name": "pairs/turns.jsonl", "formatting": "sharegpt", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": {**rows, "tags": _TAGS}}), encoding="utf-8")


_SAVED = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "seed": 1}
_TRAINED = {**_SAVED, "num_train_epochs": 1, "per_device_train_batch_size": _BATCH, "report_to": "none"}
_AXOLOTL_ROWS = {
    "path": "rows/train.jsonl", "ds_type": "json", "split": "train", "type": "chat_template",
    "field_messages": "messages", "message_property_mappings": {"role": "role", "content": "content"},
}  # fmt: skip

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "test_datasets": [_AXOLOTL_ROWS]}
LORA = {
    "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"],
}  # fmt: skip
"""Changes of axolotl's settings."""

_PAIRS = ("pairs.parquet", "--kind", "arrow", "--column", "length")

FRAMEWORKS = {
    "llama_factory": Framework(
        package="llamafactory",
        typed=("llamafactory-cli", "train"),
        started="llamafactory.launcher",
        settings={
            **_TRAINED, "model_name_or_path": "model", "stage": "dpo", "pref_beta": 0.1, "do_train": True, "finetuning_type": "full",
            "dataset": "pairs", "dataset_dir": ".", "template": "qwen3_nothink", "cutoff_len": 512, "use_cpu": True,
            "disable_shuffling": True,
        },
        trainer="CustomDPOTrainer",
        has_file=True,
        source=_PAIRS,
        logged=("rewards/margins",),
    ),
    "ms_swift": Framework(
        package="swift",
        typed=("swift", "rlhf"),
        started="swift.cli.rlhf",
        settings={
            **_TRAINED, "model": "model", "model_type": "qwen3", "template": "qwen3_nothinking",
            "rlhf_type": "dpo", "dataset": "pairs/answer.jsonl", "add_version": False, "tuner_type": "full", "torch_dtype": "float32",
            "gradient_accumulation_steps": 1, "dataset_shuffle": False, "train_dataloader_shuffle": False,
            "use_cpu": True, "max_length": 512, "split_dataset_ratio": 0,
        },
        trainer="DPOTrainer",
        source=_PAIRS,
        logged=("rewards/margins",),
    ),
    "axolotl": Framework(
        package="axolotl",
        typed=("axolotl", "train"),
        started="axolotl.cli.train",
        settings={
            **_SAVED, "base_model": "model", "datasets": [_AXOLOTL_ROWS], "chat_template": "tokenizer_default",
            "sequence_len": 512, "micro_batch_size": _BATCH, "gradient_accumulation_steps": 1, "num_epochs": 1,
            "optimizer": "adamw_torch", "lr_scheduler": "linear", "dataset_prepared_path": "prepared",
            "val_set_size": 0, "bf16": False, "fp16": False, "attn_implementation": "sdpa",
            "shuffle_merged_datasets": False, "curriculum_sampling": True, "plugins": ["cpu_ranks.CpuRanks"],
        },
        trainer="AxolotlTrainer",
        has_file=True,
        variables={"ACCELERATE_USE_CPU": "1", "AXOLOTL_DO_NOT_TRACK": "1"},
    ),
}  # fmt: skip
