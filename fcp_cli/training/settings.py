"""The settings of the bundled trainer, and how they travel through a torchrun command line. Imports no torch.

Fields marked `Opt` are options of `fcp launch`, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from fcp_cli.errors import UsageError
from fcp_cli.options import Opt, check_limits

if TYPE_CHECKING:
    from fcp_cli.plan.metadata import Sync

Device: TypeAlias = Literal["auto", "cpu", "cuda", "npu"]


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
        zero: what ranks share out (`zero_stage_of`).
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
    device: Device = "auto"
    steps: Annotated[
        int | None, Opt("Stop after step N, counted from the start of the run.", min=1, unset="the plan's")
    ] = None
    learning_rate: Annotated[float, Opt("Peak of the schedule.", min=0)] = 3e-4
    warmup_steps: Annotated[int, Opt("Steps of linear warm-up.", min=0)] = 10
    decay_steps: Annotated[int | None, Opt("Where the cosine ends.", min=1, unset="the plan's steps")] = None
    min_learning_rate_ratio: float = 0.1
    weight_decay: Annotated[float, Opt("Weight decay of matrices.", min=0)] = 0.1
    max_grad_norm: Annotated[float, Opt("Clip gradients to this norm; 0: never.", min=0)] = 1.0
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Opt("Type of matrix products; auto: by device.")] = "auto"
    zero: Annotated[
        Literal["auto", "0", "2", "3"],
        Opt("What ranks share out: 0 nothing, 2 optimizer and gradients, 3 weights, too; auto: by sync and device."),
    ] = "auto"
    recompute: Annotated[bool, Opt("Recompute activations in backward.")] = False
    freeze_vision: Annotated[bool, Opt("Train the language model of a vision model only.")] = False
    seed: Annotated[int, Opt("Seed of the initial weights.", min=0)] = 0
    checkpoint_every: Annotated[int, Opt("Steps between checkpoints; 0: only at the end.", min=0)] = 100
    keep_checkpoints: Annotated[int, Opt("Newest checkpoints that stay.", min=1)] = 2
    length_column: Annotated[str, Opt("Column of the manifest with lengths.")] = "length"
    log_every: Annotated[int, Opt("Steps per line without a terminal.", min=1)] = 10
    resume: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        check_limits(self)
        # No options of `fcp launch`, or not of the trainer alone: only the trainer's own command line sets these here.
        if self.device not in get_args(Device):
            raise UsageError(f"--device is {self.device!r}; it must be one of {', '.join(get_args(Device))}")
        if not self.min_learning_rate_ratio >= 0:
            raise UsageError(f"--min-learning-rate-ratio is {self.min_learning_rate_ratio}; it must be at least 0")

    def argv(self) -> list[str]:
        """Return the arguments that `parse_settings` reads back; what is at its default is left out."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default:
                continue
            words.append(f"--{f.name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
        return words


def zero_stage_of(zero: str, *, sync: Sync, device: str) -> int:
    """Return the ZeRO stage of a run: 0 replicas, 2 optimizer state shared out, 3 weights, too.

    Under stage 2, weights are gathered once a step, and gradients are whole on every rank until the step ends.

    Args:
        zero: of `TrainSettings`; `auto` is 3 under `microbatch`, and under `iteration` 2 on accelerators, 0 on CPUs,
            whose memory one shares anyway.
        sync: of the plan.
        device: kind of device that the ranks run on.

    Raises:
        UsageError: stage 3 under `iteration`: gathering weights again for each micro-batch needs all ranks at once,
            which there run different numbers of them.
    """
    if zero == "3" and sync == "iteration":
        raise UsageError(
            "--zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; "
            "give --zero 2, or plan with 'fcp plan --sync microbatch'"
        )
    if zero != "auto":
        return int(zero)
    if sync == "microbatch":
        return 3
    return 0 if device == "cpu" else 2


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Read the trainer's command line; --plan and --run-dir fall back on FCP_PLAN and FCP_RUN_DIR."""
    import argparse  # here: every `fcp` command imports this module

    parser = argparse.ArgumentParser(
        prog="python -m fcp_cli.training.train",
        description="Train a model under a plan. Run it with torchrun, one process per rank; 'fcp launch' does.",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainSettings)
    for f in fields(TrainSettings):
        parser.add_argument(f"--{f.name.replace('_', '-')}", **_argument(f.name, hints[f.name], f.default))
    return TrainSettings(**vars(parser.parse_args(argv)))


def _argument(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """Return how argparse reads one field."""
    if hint is bool:
        return {"action": "store_true"}
    kind = str if get_origin(hint) is Literal else next((part for part in get_args(hint) if part is not NoneType), hint)
    if default is not MISSING:
        return {"type": kind, "default": default, "help": "default: %(default)s"}
    fallback = os.environ.get({"plan": "FCP_PLAN", "run_dir": "FCP_RUN_DIR"}.get(name, ""))
    return {"type": kind, "required": fallback is None, "default": kind(fallback) if fallback else None}
