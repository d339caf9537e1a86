"""Ways to tune a part of a small checkpoint, the rows that they read, and what one Hugging Face process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.cost.recipe import Recipe
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.training.settings import TrainSettings
from tests.runtime.models import LEVELS
from tests.runtime.plans import Row, levels_profile, write_plan
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import Inputs

_VISION = FAMILIES["qwen3_vl"]
NUM_RANKS = 4
STEPS = 5
SAVED_STEPS = 3
EVALUATED_EVERY = 2
# These train once more with evaluations between the steps.
EVALUATED = ("adapters, 2", "adapters as needed, 3", "frozen, 1")
VOCAB_SIZE = 64
_TEXT: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
}
Family = Literal["qwen3", "llama", "qwen3_vl"]
# (ranks, sequences) of each micro-batch; ranks have different numbers of them, and some none.
_ITERATION = (
    (((0, 1, 2), 2), ((1, 2, 3), 1), ((0, 3), 2), ((0, 1), 1)),
    (((0, 2), 2), ((2,), 1), ((1,), 0), ((3,), 0)),
    (((0, 1, 2, 3), 2), ((1,), 2), ((3,), 1)),
)
_WAVES = (
    ((((0, 1, 2), 2), ((3,), 1)), (((0, 3), 2), ((1, 2), 1))),
    ((((0, 1, 2, 3), 3),), (((1, 3), 2), ((0,), 1), ((2,), 0))),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained of which model, how it is shared out, and how one process does the same.

    Attributes:
        asked: further settings of the run.
        lora: arguments of peft's LoraConfig; none: no adapters.
        is_frozen: whether the process freezes a parameter of this name.
        schedule: name and arguments of transformers' schedule.
        as_needed: layers recompute by the levels of the plan.
    """

    family: Family = "qwen3"
    sync: Sync = "iteration"
    zero: int = 0
    asked: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    is_frozen: Callable[[str], bool] | None = None
    schedule: tuple[str, Mapping[str, Any]] = ("linear", {})
    as_needed: bool = False

    def settings(self, folder: Path, run_dir: Path, **changes: Any) -> TrainSettings:
        given: dict[str, Any] = {
            "plan": plan_path(folder, self),
            "model": str(folder / self.family),
            "weights": folder / self.family,
            "run_dir": run_dir,
            "device": "cpu",
            "zero": str(self.zero),
            "precision": "fp64",
            "learning_rate": 3e-3,
            "lr_schedule": "linear",
            "warmup_steps": 2,
            "min_learning_rate_ratio": 0.0,
            "max_grad_norm": 0.1,
            "checkpoint_every": 0,
            "quiet": True,
        }
        return TrainSettings(**{**given, **self.asked, **changes})


def _is_of_first_layer_or_table(name: str) -> bool:
    return ".layers.0." in name or "embed_tokens" in name


_Q_AND_V: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
_ALL: Mapping[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
_ADAPTERS: Mapping[str, Any] = {"asked": {"lora": "r=4,alpha=8,target=q_proj+v_proj"}, "lora": _Q_AND_V}
_EVERYWHERE: Mapping[str, Any] = {"asked": {"lora": "r=2,target=all-linear", "recompute": "full"}, "lora": _ALL}
_FROZEN: Mapping[str, Any] = {
    "asked": {"freeze": "layers.0.*, embed_tokens.*"},
    "is_frozen": _is_of_first_layer_or_table,
}
_ENCODER: Mapping[str, Any] = {"asked": {"freeze": "visual.*"}, "is_frozen": lambda name: ".visual." in name}

CASES: Mapping[str, Case] = {
    "adapters, 2": Case(zero=2, **_EVERYWHERE),
    "adapters as needed, 3": Case(zero=3, sync="microbatch", family="llama", as_needed=True, **_ADAPTERS),
    "frozen, 1": Case(
        zero=1,
        asked={**_FROZEN["asked"], "lr_schedule": "cosine"},
        is_frozen=_FROZEN["is_frozen"],
        schedule=("cosine", {}),
    ),
    "adapters beside a frozen encoder, 2": Case(
        zero=2,
        family="qwen3_vl",
        asked={"lora": _ADAPTERS["asked"]["lora"], "freeze_vision": True},
        lora=_Q_AND_V,
    ),
}
# All of it: `make test-full`.
FULL: Mapping[str, Case] = {
    f"{what}, {family}, {zero} {sync}": Case(family=family, zero=zero, sync=sync, **how)  # type: ignore[arg-type]
    for what, families, how in (
        ("adapters", ("qwen3", "llama", "qwen3_vl"), _ADAPTERS),
        ("adapters everywhere", ("qwen3", "llama", "qwen3_vl"), _EVERYWHERE),
        ("frozen", ("qwen3", "llama"), _FROZEN),
        ("frozen encoder", ("qwen3_vl",), _ENCODER),
    )
    for family in families
    for zero, sync in (
        *((zero, "iteration") for zero in (0, 1, 2)),
        *((zero, "microbatch") for zero in (0, 1, 2, 3)),
    )
}


def plan_path(folder: Path, case: Case) -> Path:
    what = "pictures" if case.family == "qwen3_vl" else "as-needed" if case.as_needed else "text"
    return folder / f"{what}-{case.sync}.parquet"


def write_inputs(folder: Path) -> None:
    """Three checkpoints, and two plans for text and two for pictures."""
    import transformers

    torch.manual_seed(7)
    family: Any = transformers.AutoModelForCausalLM
    for name in ("qwen3", "llama"):
        config = transformers.AutoConfig.for_model(name, **_TEXT, tie_word_embeddings=name == "qwen3")
        family.from_config(config).save_pretrained(folder / name)
    _VISION.model().save_pretrained(folder / "qwen3_vl")
    held_out: dict[str, Any] = {"iteration": [[(group, -1) for group in groups] for groups in _ITERATION[:2]]}
    held_out["microbatch"] = [[(group, wave) for wave, groups in enumerate(_WAVES[0]) for group in groups]]
    for sync, layout in held_out.items():
        _write_plan(folder / f"held-out-{sync}.parquet", layout, _text_length, sync)  # type: ignore[arg-type]
    for what, length_of in (("text", _text_length), ("pictures", lambda row: len(_VISION.inputs_of(row).input_ids))):
        iteration = [[(group, -1) for group in _ITERATION[step % 3]] for step in range(STEPS)]
        waves = [
            [(group, wave) for wave, groups in enumerate(_WAVES[step % 2]) for group in groups] for step in range(STEPS)
        ]
        for sync, layout in (("iteration", iteration), ("microbatch", waves)):
            _write_plan(folder / f"{what}-{sync}.parquet", layout, length_of, sync)  # type: ignore[arg-type]
    levels = {"recipe": Recipe(zero_stage=3, recompute="as-needed"), "cost_profile": levels_profile(*LEVELS)}
    _write_plan(folder / "as-needed-microbatch.parquet", waves, _text_length, "microbatch", **levels)


def evaluation_plan_path(folder: Path, case: Case) -> Path:
    return folder / f"held-out-{case.sync}.parquet"


def _write_plan(path: Path, layout: Any, length_of: Callable[[int], int], sync: Sync, **changes: Any) -> None:
    row, steps = 0, []
    for groups in layout:
        rows = []
        for (ranks, count), wave in groups:
            rows.append(Row(ranks, [length_of(number) for number in range(row, row + count)], wave))
            row += count
        steps.append(rows)
    write_plan(path, steps, num_ranks=NUM_RANKS, rows=1000, sync=sync, **changes)


def _text_length(row: int) -> int:
    return 3 + row * 7 % 29


def _text(row: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens and labels of a row; the first third is not learned, and of every fourth row nothing."""
    tokens = np.random.default_rng(row).integers(0, VOCAB_SIZE, _text_length(row), dtype=np.int64)
    first = len(tokens) if row % 4 == 0 else len(tokens) // 3
    return tokens, np.where(np.arange(len(tokens)) < first, -100, tokens)


def _picture_inputs(row: int) -> Inputs:
    inputs = _VISION.inputs_of(row)
    return replace(inputs, labels=np.full_like(inputs.labels, -100)) if row % 4 == 0 else inputs


def fetch_of(case: Case) -> Callable[[int], Any]:
    if case.family != "qwen3_vl":
        return _text
    return lambda row: _VISION.sequence(inputs := _picture_inputs(row), inputs.labels)


def train_alone(
    folder: Path, case: Case, after: Callable[[int, Any], None] = lambda step, model: None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process by transformers, peft and PyTorch alone; return losses and trained weights by name.

    `after` is called with each step that was trained, and the model.
    """
    import peft
    import transformers

    family: Any = getattr(
        transformers, "AutoModelForImageTextToText" if case.family == "qwen3_vl" else "AutoModelForCausalLM"
    )
    model: Any = family.from_pretrained(folder / case.family, dtype=torch.float64)
    if case.lora:
        torch.manual_seed(0)
        exclude = r".*\.visual\..*" if case.asked.get("freeze_vision") else None
        config = peft.LoraConfig(**case.lora, exclude_modules=exclude, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if case.is_frozen is not None and case.is_frozen(name):
            parameter.requires_grad_(False)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [parameter for parameter in trained.values() if parameter.ndim >= 2]
    others = [parameter for parameter in trained.values() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3, betas=(0.9, 0.95))
    name, arguments = case.schedule
    scheduler = transformers.get_scheduler(name, optimizer, 2, STEPS, scheduler_specific_kwargs=dict(arguments))
    losses = []
    for step in PlanReader(plan_path(folder, case)).steps():
        losses.append(_step(model, [int(row) for row in step.sequences], case))
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        after(step.step, model)
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


def _logits(model: Any, ids: np.ndarray[Any, Any]) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(ids)[None]).logits
    return logits


@torch.no_grad()
def evaluate_alone(folder: Path, case: Case, model: Any) -> dict[int, tuple[float, int]]:
    """Loss per token and tokens of the held-out rows by the power of two that their lengths do not exceed."""
    sums: dict[int, tuple[float, int]] = {}
    for step in PlanReader(evaluation_plan_path(folder, case)).steps():
        for row in step.sequences:
            ids, labels = (torch.from_numpy(one) for one in _text(int(row)))
            bucket = 1 << (len(ids) - 1).bit_length()
            loss = functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="sum")
            total, tokens = sums.get(bucket, (0.0, 0))
            sums[bucket] = total + float(loss), tokens + int((labels[1:] != -100).sum())
    return {bucket: (total / tokens, tokens) for bucket, (total, tokens) in sorted(sums.items()) if tokens}


def _step(model: Any, rows: list[int], case: Case) -> float:
    """Run backward over the rows; return their loss."""
    if case.family == "qwen3_vl":
        inputs = [_picture_inputs(row) for row in rows]
        labels = [torch.from_numpy(one.labels) for one in inputs]
        forwards = [partial(_VISION.logits_alone, model, one) for one in inputs]
    else:
        texts = [_text(row) for row in rows]
        labels = [torch.from_numpy(one) for _, one in texts]
        forwards = [partial(_logits, model, ids) for ids, _ in texts]
    learned = sum(int((one[1:] != -100).sum()) for one in labels)
    total = 0.0
    for forward, wanted in zip(forwards, labels, strict=True):
        loss = functional.cross_entropy(forward()[0, :-1], wanted[1:], reduction="sum") / learned
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total
