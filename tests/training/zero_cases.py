"""Ways to share out a small model's training, the plans that they follow, and what one process computes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.choices import OnNan
from fcp_cli.training.data import open_data
from fcp_cli.training.optimizer import learning_rate_at, set_learning_rate
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights import build_model
from tests.runtime.plans import Row, write_plan

NUM_RANKS = 4
STEPS = 3
VOCAB_SIZE = 61  # no multiple of the ranks: the last share of the table is smaller
# Tied weights; normalisations of six numbers, of which the last of four ranks updates none.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
}
LAYER_GROUPS = CONFIG["num_hidden_layers"] + 1  # and what is left: table and last norm
# Rank 0 runs four micro-batches and rank 2 two; then ranks 1 and 3 none but an idle one.
UNEQUAL = (
    (Row([0, 1, 2], [20, 5]), Row([1, 2, 3], [9]), Row([0, 3], [16, 3]), Row([0, 1], [6]), Row([0], [4])),
    (Row([0, 2], [17, 8]), Row([2], [30]), Row([1]), Row([3])),
    (Row([0, 1, 2, 3], [41, 2]), Row([1], [3, 3]), Row([3], [12])),
)
IN_WAVES = (
    (Row([0, 1, 2], [20, 5], 0), Row([3], [9], 0), Row([0, 3], [16, 3], 1), Row([1, 2], [6], 1)),
    (Row([0, 1], [4], 0), Row([2, 3], [11, 2], 0), Row([0, 2], [8], 1), Row([1], [3], 1), Row([3], (), 1)),
    (Row([0, 1, 2, 3], [41, 2], 0),),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """How a run shares out what it holds; clipping bites in every step."""

    sync: Sync = "iteration"
    zero: int = 0
    precision: str = "fp64"
    reduce: str = "wave"
    shard_ranks: int | None = None
    recompute: str = "full"

    def settings(self, folder: Path, run_dir: Path, **changes: Any) -> TrainSettings:
        given: dict[str, Any] = {
            "plan": plan_path(folder, self.sync),
            "model": str(folder / "config.json"),
            "run_dir": run_dir,
            "device": "cpu",
            "zero": str(self.zero),
            "shard_ranks": self.shard_ranks,
            "reduce": self.reduce,
            "precision": self.precision,
            "recompute": self.recompute,
            "learning_rate": 3e-3,
            "warmup_steps": 1,
            "max_grad_norm": 0.1,
            "steps": STEPS,
            "quiet": True,
        }
        return TrainSettings(**{**given, **changes})


def plan_path(folder: Path, sync: Sync) -> Path:
    return folder / f"{sync}.parquet"


def write_inputs(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_plan(plan_path(folder, "iteration"), UNEQUAL, num_ranks=NUM_RANKS, rows=100)
    write_plan(plan_path(folder, "microbatch"), IN_WAVES, num_ranks=NUM_RANKS, rows=100, sync="microbatch")


_WAVES = Case(sync="microbatch")
EXACT: Mapping[str, Case] = {
    "0 iteration": Case(),
    "1 iteration": Case(zero=1),
    "2 iteration": Case(zero=2),
    "1 hsdp iteration": Case(zero=1, shard_ranks=2),
    "2 hsdp iteration": Case(zero=2, shard_ranks=2),
    "0 waves": _WAVES,
    "1 waves": replace(_WAVES, zero=1),
    "2 waves": replace(_WAVES, zero=2),
    "3 waves": replace(_WAVES, zero=3),
    "3 waves, reduced once": replace(_WAVES, zero=3, reduce="step"),
    "1 hsdp waves": replace(_WAVES, zero=1, shard_ranks=2),
    "2 hsdp waves": replace(_WAVES, zero=2, shard_ranks=2),
    "3 hsdp waves": replace(_WAVES, zero=3, shard_ranks=2),
    "3 hsdp waves, reduced once": replace(_WAVES, zero=3, shard_ranks=2, reduce="step"),
}
SINGLE: Mapping[str, Case] = {
    f"{name}, fp32": replace(EXACT[name], precision="fp32", recompute="none")
    for name in ("0 iteration", "1 iteration", "2 iteration", "3 waves")
}
COARSE: Mapping[str, Case] = {
    f"{name}, {precision}": replace(EXACT[name], precision=precision)
    for precision, names in (
        ("bf16", ("0 iteration", "1 iteration", "2 iteration", "1 hsdp waves", "3 waves")),
        ("amp", ("0 iteration", "2 iteration", "3 waves")),
    )
    for name in names
}
CASES: Mapping[str, Case] = {**EXACT, **SINGLE, **COARSE}
# Every stage, sync, precision and way to reduce once; the marker `full` runs all of them.
EXAMPLES = frozenset(
    {
        *("0 iteration", "2 iteration", "1 hsdp iteration", "1 waves", "3 waves", "2 hsdp waves"),
        "3 hsdp waves, reduced once",
        *("2 iteration, fp32", "3 waves, fp32"),
        *("0 iteration, bf16", "1 iteration, bf16", "3 waves, bf16", "0 iteration, amp", "2 iteration, amp"),
    }
)

# What saves after two of three steps of the waves, in the precision that has master weights, and what resumes from it.
SAVED_STEPS = 2
SAVING: Mapping[str, Case] = {
    name: replace(EXACT[f"{name} waves"], precision="bf16") for name in ("0", "1", "2", "3", "1 hsdp", "3 hsdp")
}
RESUMING = (
    *((name, name) for name in SAVING),
    *(("0", "1"), ("1", "0"), ("1", "2"), ("2", "1"), ("2", "3"), ("3", "0"), ("1 hsdp", "3"), ("0", "3 hsdp")),
)
RESUMING_EXAMPLES = frozenset(
    {("1", "1"), ("3", "3"), ("0", "1"), ("1", "2"), ("2", "3"), ("3", "0"), ("1 hsdp", "3"), ("0", "3 hsdp")}
)
# In the second of three steps one rank's loss, or every rank's gradient, is not finite.
NOT_FINITE: Sequence[tuple[str, Case, OnNan]] = (
    ("loss", EXACT["1 iteration"], "skip-step"),
    ("loss", EXACT["3 waves"], "skip-step"),
    ("gradient", EXACT["0 iteration"], "skip-step"),
    ("gradient", EXACT["0 iteration"], "stop"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one process, or all ranks together, computed.

    Attributes:
        gradients: per step, name -> whole gradient, before clipping.
        norms: [steps] the global norm of them.
        weights: name -> whole weights after the last step.
        moments: per trained weight, Adam's two; none for one process.
    """

    gradients: list[dict[str, np.ndarray]]
    norms: list[float]
    weights: dict[str, np.ndarray]
    moments: list[dict[str, np.ndarray]]


def train_alone(folder: Path, case: Case) -> Trained:
    """Train in one process that knows of no ranks: sequence by sequence, PyTorch's attention and default AdamW."""
    import transformers

    config = transformers.AutoConfig.for_model(**CONFIG)
    family: Any = transformers.AutoModelForCausalLM
    model: Any = family.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict(build_model(str(folder / "config.json"), seed=0, device=torch.device("cpu")).state_dict())
    model = model.to({"fp64": torch.float64}.get(case.precision, torch.float32))
    settings = case.settings(folder, folder)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    fetch = open_data(settings.plan, (), vocab_size=VOCAB_SIZE, seed=0)
    gradients, norms = [], []
    for step in PlanReader(settings.plan).steps():
        optimizer.zero_grad()
        for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
            ids = torch.as_tensor(fetch(row))[:length]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / int((step.lengths - 1).sum())
            torch.autograd.backward(loss)
        gradients.append({name: p.grad.double().numpy().copy() for name, p in model.named_parameters()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        set_learning_rate(optimizer, learning_rate_at(step.step, settings=settings, plan_steps=STEPS))
        optimizer.step()
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    return Trained(gradients=gradients, norms=norms, weights=weights, moments=[])
