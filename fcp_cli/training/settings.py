"""Everything the bundled trainer can be told, and how it travels through a torchrun command line. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fcp_cli.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda", "npu")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings of one run. The plan decides data order, batch sizes and ranks; nothing here repeats it.

    Attributes:
        plan: plan file.
        model: name of a shipped model, a model YAML, or a Hugging Face config.json.
        run_dir: folder for metrics and checkpoints, shared by all nodes.
        manifest: the manifest of the plan, whose source holds the tokens; None trains on synthetic tokens.
        length_column: the manifest's column that was planned.
        steps: stop after this many steps in all; None runs the whole plan.
        learning_rate: peak, reached after `warmup_steps`.
        decay_steps: steps over which the cosine falls to `min_learning_rate_ratio` of the peak; None means the plan's.
            It does not depend on `steps`, so that a run stopped early and resumed follows the same schedule.
        max_grad_norm: global gradient norm to clip to; 0 turns clipping off.
        dtype: of the matrix products; weights and optimizer states stay float32. `auto` is bfloat16 on an accelerator.
        recompute: drop each layer's activations in forward and compute them again in backward.
        freeze_vision: train the language model only; the vision encoder runs without backward.
        checkpoint_every: steps between checkpoints; 0 saves only at the end and on Ctrl-C.
        keep_checkpoints: the newest so many stay.
        log_every: steps between two lines of progress where there is no terminal.
        quiet: no progress; whoever started the run shows it from the metrics.
    """

    plan: Path
    model: str
    run_dir: Path
    manifest: Path | None = None
    length_column: str = "length"
    steps: int | None = None
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    decay_steps: int | None = None
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    recompute: bool = False
    freeze_vision: bool = False
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    resume: bool = False
    log_every: int = 10
    quiet: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")

    def argv(self) -> list[str]:
        """The arguments that `parse_settings` reads back; what is at its default is left out."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default:
                continue
            words.append(f"--{f.name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        return words


_LEAST: dict[str, float] = {
    "steps": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "decay_steps": 1,
    "min_learning_rate_ratio": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "seed": 0,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "log_every": 1,
}


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Read the trainer's command line; --plan and --run-dir fall back on FCP_PLAN and FCP_RUN_DIR."""
    parser = argparse.ArgumentParser(
        prog="python -m fcp_cli.training.train",
        description="Train a model under a plan. Run it with torchrun, one process per rank; 'fcp launch' does.",
        allow_abbrev=False,
    )
    for f in fields(TrainSettings):
        parser.add_argument(f"--{f.name.replace('_', '-')}", **_argument(f))
    values = vars(parser.parse_args(argv))
    return TrainSettings(**values)


def _argument(f: Any) -> dict[str, Any]:
    """How one field is read, from its annotation and default."""
    if f.type == "bool":
        return {"action": "store_true"}
    kind: Any = next(kind for name, kind in _KINDS.items() if f.type.startswith(name))
    fallback = os.environ.get({"plan": "FCP_PLAN", "run_dir": "FCP_RUN_DIR"}.get(f.name, ""))
    required = f.name in ("plan", "model", "run_dir")
    if required:
        return {"type": kind, "required": fallback is None, "default": kind(fallback) if fallback else None}
    return {"type": kind, "default": f.default, "help": "default: %(default)s"}


_KINDS: dict[str, Any] = {"Path": Path, "int": int, "float": float, "str": str}
