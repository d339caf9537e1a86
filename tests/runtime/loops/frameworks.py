"""Frameworks around transformers' Trainer: the lines that users type, and the settings of fine-tuning and of DPO.

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
        prepared: settings of a run of one rank that only writes the tokens that are trained.
        source: of the lengths, for `fcp manifest build`; none: the job is started without a plan.
        evaluated: settings by which it evaluates, and how often it does.
        packed: setting by which it packs, and what is said of it.
        lora: settings of adapters.
        resumes: whether it goes on from a checkpoint that it is given.
        logged: further numbers of its log that must be those of the framework alone, and how close.
        variables: of the environment, in both runs.
    """

    package: str
    typed: tuple[str, ...]
    started: str
    settings: Mapping[str, Any]
    trainer: str
    has_file: bool = False
    prepared: Mapping[str, Any] = field(default_factory=dict)
    source: tuple[str, ...] = ("rows/train.jsonl", "--tokenizer", "model")
    evaluated: tuple[Mapping[str, Any], int] = field(default_factory=lambda: ({}, 0))
    packed: tuple[str, str] = ("", "")
    lora: Mapping[str, Any] = field(default_factory=dict)
    resumes: bool = False
    logged: Mapping[str, float] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, folder: Path, name: str, **changes: Any) -> tuple[str, ...]:
        """Return the arguments of a run that writes into `name`, and write its file of settings."""
        given = {**self.settings, "output_dir": name, **changes}
        if self.has_file:
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
            return (f"{name}.yaml",)
        words: list[str] = []
        for key, value in given.items():
            said = str(value).lower() if isinstance(value, bool) else str(value)
            words += [f"--{key}", *(value if isinstance(value, list) else [said])]
        return tuple(words)


def write_plugin(folder: Path) -> None:
    """Write axolotl's plugin."""
    (folder / "cpu_ranks.py").write_text(_PLUGIN, encoding="utf-8")


def write_pairs(folder: Path) -> None:
    """Write questions, each with an answer that is preferred and one that is not, and the lengths of both together."""
    draw = random.Random(4)

    def text(*sizes: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.choice(sizes)))

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    lengths, forms = [], {name: folder / "pairs" / name / "train.jsonl" for name in ("lists", "turns", "answer")}
    for path in forms.values():
        path.parent.mkdir(parents=True)
    files = {name: path.open("w") for name, path in forms.items()}
    for _ in range(ROWS):
        asked, chosen, rejected = (
            {"role": role, "content": text(*sizes)}
            for role, sizes in (("user", (5, 40)), ("assistant", (5, 60, 250)), ("assistant", (5, 60, 120)))
        )
        pair = [tokenizer.apply_chat_template([asked, one], tokenize=False) for one in (chosen, rejected)]
        lengths.append(sum(len(tokenizer(one)["input_ids"]) for one in pair))
        records = {
            "lists": {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]},
            "turns": {"messages": [asked], "chosen": chosen, "rejected": rejected},
            "answer": {"messages": [asked, chosen], "rejected_response": rejected["content"]},
        }
        for name, record in records.items():
            files[name].write(json.dumps(record) + "\n")
    for file in files.values():
        file.close()
    pq.write_table(pa.table({"length": lengths}), folder / "pairs.parquet")


def write_dataset_info(folder: Path) -> None:
    """Write where LLaMA-Factory finds conversations and pairs."""
    common = {"formatting": "sharegpt", "tags": _TAGS}
    columns = {name: name for name in ("messages", "chosen", "rejected")}
    known = {
        "rows": {**common, "file_name": "rows/train.jsonl", "columns": {"messages": "messages"}},
        "pairs": {**common, "file_name": "pairs/turns/train.jsonl", "ranking": True, "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")


_SAVED = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "seed": 1}
_TRAINED = {
    **_SAVED,
    "num_train_epochs": 1,
    "per_device_train_batch_size": _BATCH,
    "report_to": "none",
    "use_cpu": True,
}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
_AXOLOTL_ROWS = {
    "path": "rows/train.jsonl", "ds_type": "json", "split": "train", "type": "chat_template",
    "field_messages": "messages", "message_property_mappings": {"role": "role", "content": "content"},
}  # fmt: skip
_LLAMA_FACTORY: dict[str, Any] = {
    "package": "llamafactory",
    "typed": ("llamafactory-cli", "train"),
    "started": "llamafactory.launcher",
    "has_file": True,
}
_LLAMA_FACTORY_RUN = {
    **_TRAINED, "model_name_or_path": "model", "do_train": True, "finetuning_type": "full", "dataset_dir": ".",
    "template": "qwen3_nothink", "cutoff_len": 512, "disable_shuffling": True,
}  # fmt: skip
_MS_SWIFT_RUN = {
    **_TRAINED, "model": "model", "model_type": "qwen3", "template": "qwen3_nothinking", "add_version": False,
    "tuner_type": "full", "torch_dtype": "float32", "gradient_accumulation_steps": 1, "dataset_shuffle": False,
    "train_dataloader_shuffle": False, "max_length": 512, "split_dataset_ratio": 0,
}  # fmt: skip
_TRL_RUN = {
    **_TRAINED, "model_name_or_path": "model", "train_sampling_strategy": "sequential", "max_length": 512,
    "dtype": "float32", "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
_PAIRS = ("pairs.parquet", "--kind", "arrow", "--column", "length")
_MARGINS = {"rewards/margins": 1e-4}

FINE_TUNING = {
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
        evaluated=({**_EVALUATED, "test_datasets": [_AXOLOTL_ROWS]}, 4),  # before training, too
        packed=("sample_packing", "axolotl's sample_packing is off: the plan packs, and batch sizes count sequences"),
        lora={
            "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"],
        },
        variables={"ACCELERATE_USE_CPU": "1", "AXOLOTL_DO_NOT_TRACK": "1"},
    ),
    "llama_factory": Framework(
        **_LLAMA_FACTORY,
        settings={**_LLAMA_FACTORY_RUN, "stage": "sft", "dataset": "rows"},
        trainer="CustomSeq2SeqTrainer",
        prepared={"tokenized_path": "tokens"},
        source=("tokens/train", "--kind", "arrow", "--column", "input_ids"),
        evaluated=({**_EVALUATED, "eval_dataset": "rows"}, 3),
        packed=("neat_packing", "LLaMA-Factory's neat_packing is off: the plan packs"),
        lora={"finetuning_type": "lora", "lora_rank": 4},
    ),
    "ms_swift": Framework(
        package="swift",
        typed=("swift", "sft"),
        started="swift.cli.sft",
        settings={**_MS_SWIFT_RUN, "dataset": "rows/train.jsonl"},
        trainer="Seq2SeqTrainer",
        evaluated=({**_EVALUATED, "val_dataset": "rows/train.jsonl"}, 3),
        packed=("packing", "ms-swift's packing is off: the plan packs"),
        lora={"tuner_type": "lora", "lora_rank": 4, "lora_dropout": 0, "target_modules": ["q_proj", "v_proj"]},
        resumes=True,
        logged={"token_acc": 0.0},
    ),
    "trl_scripts": Framework(
        package="trl",
        typed=("trl", "sft"),
        started="trl.scripts.sft",
        settings={**_TRL_RUN, "dataset_name": "rows"},
        trainer="SFTTrainer",
        packed=("packing", "TRL's packing is off: the plan packs"),
        resumes=True,
        logged={"num_tokens": 0.0, "mean_token_accuracy": 1e-6},
    ),
}  # fmt: skip

PREFERENCES = {
    "llama_factory": Framework(
        **_LLAMA_FACTORY,
        settings={**_LLAMA_FACTORY_RUN, "stage": "dpo", "pref_beta": 0.1, "dataset": "pairs"},
        trainer="CustomDPOTrainer",
        source=_PAIRS,
        logged=_MARGINS,
    ),
    "ms_swift": Framework(
        package="swift",
        typed=("swift", "rlhf"),
        started="swift.cli.rlhf",
        settings={**_MS_SWIFT_RUN, "rlhf_type": "dpo", "dataset": "pairs/answer/train.jsonl"},
        trainer="DPOTrainer",
        source=_PAIRS,
        logged=_MARGINS,
    ),
    "trl_scripts": Framework(
        package="trl",
        typed=("trl", "dpo"),
        started="trl.scripts.dpo",
        settings={**_TRL_RUN, "dataset_name": "pairs/lists"},
        trainer="DPOTrainer",
        source=(),
        logged=_MARGINS,
    ),
}
