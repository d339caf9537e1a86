"""Settings of the bundled trainer, and their conversion to and from a command line. Imports no torch.

Fields marked with `Opt` are also options of `fcp launch`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from fcp_cli.cost.recipe import Recipe, RecipeRequest, check_recipe, check_tuning, recipe_to_follow
from fcp_cli.errors import UsageError
from fcp_cli.runtime.choices import GradRingDtype, OnNan
from fcp_cli.util.options import MOST_WORKERS, Opt, check_limits
from fcp_cli.util.plugins import pip_install

BadRows: TypeAlias = Literal["error", "skip"]
Device: TypeAlias = Literal["auto", "cpu", "cuda", "npu"]
LrSchedule: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings(RecipeRequest):
    """Settings of a run. Data order, batch sizes and ranks come from the plan and are not repeated here.

    Attributes:
        plan: plan file.
        model: name of a shipped model, a model YAML, a Hugging Face config.json, or the folder of a checkpoint.
        weights: folder of the initial Hugging Face checkpoint; None: random weights.
        run_dir: folder for metrics and checkpoints, shared by all nodes.
        manifest: manifest(s) of the plan, whose sources have the tokens; (): synthetic tokens.
        length_column: planned length column of the manifest.
        bad_rows: action if images or videos of a row fail to decode: stop, or skip and count the row.
        decode_workers: decoder processes per rank; 0 decodes in the trainer's process.
        random_weights: whether random weights were requested, even if the model is a checkpoint.
        export_every: steps between Hugging Face exports to the run directory's `model`; there is always one at the end.
        steps: total number of steps; None: all of the plan.
        learning_rate: peak, reached after `warmup_steps`; a value below 1 is a share of the schedule, as in
            transformers.
        lr_schedule: decay from the peak to `min_learning_rate_ratio` of it; `wsd` keeps the peak and decays over the
            last `wsd_decay_ratio` of the steps.
        decay_steps: length of the schedule; None: the plan's steps. Independent of `steps`, so that a resumed run
            follows the same schedule.
        max_grad_norm: maximum global gradient norm; 0 disables clipping.
        on_nan: action if loss or gradient norm is NaN or infinite.
        zero, shard_ranks, reduce, precision, recompute, loss, offload, freeze_vision, lora, freeze: recipe settings;
            `auto`, None and False leave them to the plan (see `TrainSettings.recipe`).
        eval_manifest, eval_plan: held-out rows and their plan; None: planned at the start, in the run directory.
        eval_every: steps between evaluations; there is always one at the end.
        grad_ring_dtype: dtype of ring messages with gradients of 16-bit keys and values.
        checkpoint_every: steps between checkpoints; 0: only at the end and on Ctrl-C.
        keep: number of newest checkpoints to keep.
        accept_unrecorded: whether to resume if the metrics lack steps of the checkpoint.
        async_save: whether to copy the state and write checkpoints in the background.
        wandb: Weights & Biases project for curves, in addition to TensorBoard.
        log_every: steps between progress lines without a terminal.
        quiet: whether to hide progress, which the launcher shows from the metrics.
    """

    # Not options of `fcp launch`: a run follows the recipe of its plan.
    shard_ranks: int | None = None
    reduce: Literal["auto", "step", "wave"] = "auto"
    recompute: Literal["auto", "none", "activation", "elementwise", "selective", "full", "as-needed"] = "auto"
    loss: Literal["auto", "chunked", "plain"] = "auto"
    offload: Literal["auto", "none", "activations"] = "auto"
    plan: Path
    model: str
    run_dir: Path
    weights: Annotated[
        Path | None,
        Opt(
            "Checkpoint to start from.",
            metavar="FOLDER|random",
            unset="the model's, else random",
            common=True,
            group="weights",
        ),
    ] = None
    random_weights: bool = False
    export_every: Annotated[int, Opt("Steps between exports of RUN/model; 0: only at the end.", min=0)] = 0
    manifest: tuple[Path, ...] = ()
    eval_manifest: Annotated[Path | None, Opt("Held-out rows to evaluate.", unset="none", group="evaluation")] = None
    eval_plan: Annotated[Path | None, Opt("Plan over those rows.", unset="made at the start")] = None
    eval_every: Annotated[int, Opt("Steps between two evaluations; 0: only at the end.", min=0)] = 0
    device: Device = "auto"
    steps: Annotated[
        int | None,
        Opt("Last step, counted from the run's start.", min=1, unset="the plan's", common=True, group="optimizer"),
    ] = None
    learning_rate: Annotated[float, Opt("Peak of the schedule.", min=0, common=True)] = 3e-4
    lr_schedule: Annotated[LrSchedule, Opt("Learning rate schedule after the warm-up, with transformers' names.")] = (
        "cosine"
    )
    warmup_steps: Annotated[
        float, Opt("Steps of linear warm-up; below 1: a share of the schedule.", metavar="N|X", min=0)
    ] = 10
    decay_steps: Annotated[int | None, Opt("Step at which the schedule ends.", min=1, unset="the plan's steps")] = None
    wsd_decay_ratio: Annotated[float, Opt("Share of the steps over which wsd decays.", min=0, max=1)] = 0.1
    min_learning_rate_ratio: Annotated[float, Opt("Final learning rate, as a share of the peak.", min=0, max=1)] = 0.1
    weight_decay: Annotated[float, Opt("Weight decay of matrices.", min=0)] = 0.1
    max_grad_norm: Annotated[float, Opt("Clip gradients to this norm; 0: never.", min=0)] = 1.0
    on_nan: Annotated[
        OnNan,
        Opt("On a NaN or infinite loss or gradient norm: stop, skip the step on all ranks, or continue."),
    ] = "stop"
    grad_ring_dtype: Annotated[
        GradRingDtype,
        Opt(
            "Type in which gradients of bf16 keys are sent; bf16 sends a third less in backward.",
            group="memory and precision",
        ),
    ] = "fp32"
    seed: Annotated[int, Opt("Seed of the initial weights.", min=0, group="weights")] = 0
    checkpoint_every: Annotated[
        int, Opt("Steps between checkpoints; 0: only at the end.", min=0, group="checkpoints")
    ] = 100
    keep: Annotated[int, Opt("Number of newest checkpoints to keep.", min=1)] = 2
    accept_unrecorded: Annotated[bool, Opt("Resume from a checkpoint even if the metrics lack some of its steps.")] = (
        False
    )
    async_save: Annotated[bool, Opt("Write checkpoints in the background.", negatable=True)] = True
    length_column: Annotated[str, Opt("Column of the manifest with lengths.", group="data")] = "length"
    bad_rows: Annotated[BadRows, Opt("At a row whose image fails to decode: stop, or skip and count it.")] = "error"
    decode_workers: Annotated[
        int | None,
        Opt(
            "Processes per rank that decode images; 0: none.",
            min=0,
            max=MOST_WORKERS,
            unset="the rank's share of cores",
        ),
    ] = None
    wandb: Annotated[
        str | None,
        Opt(
            "Weights & Biases project to log to as well.",
            metavar="PROJECT",
            unset="none",
            trust="runs",
            group="progress",
        ),
    ] = None
    log_every: Annotated[int, Opt("Steps per line without a terminal.", min=1)] = 10
    resume: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        check_limits(self)
        check_tuning(self.lora, self.freeze)
        if self.eval_manifest is None and (self.eval_plan is not None or self.eval_every):
            raise UsageError(f"--eval-{'plan' if self.eval_plan else 'every'} needs --eval-manifest, the held-out rows")
        # Checked here because only the trainer's own command line sets it.
        if self.device not in get_args(Device):
            raise UsageError(f"--device is {self.device!r}; it must be one of {', '.join(get_args(Device))}")

    def recipe(self, planned: Recipe | None, *, sync: str, device: str) -> Recipe:
        """Return the recipe of the run: requested settings, else the plan's, else the default of sync and device.

        Args:
            planned: recipe recorded in the plan.
            sync: sync of the plan.
            device: device kind of the ranks.
        """
        recipe = self.applied_to(recipe_to_follow(planned, sync=sync, device=device))
        check_recipe(recipe, sync=sync)
        if recipe.recompute == "as-needed" and (planned is None or planned.recompute != "as-needed"):
            made = "names no recipe" if planned is None else f"was made for --recompute {planned.recompute}"
            raise UsageError(
                f"--recompute as-needed takes its levels from the plan, and this one {made}; plan with "
                "'fcp plan --recompute as-needed', or drop the option"
            )
        return recipe

    def argv(self) -> list[str]:
        """Return the arguments for `parse_settings`, without defaults."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default:
                continue
            flag = f.name.replace("_", "-")
            words.append(f"--no-{flag}" if value is False else f"--{flag}")
            if not isinstance(value, bool):
                words += map(str, value) if isinstance(value, tuple) else [str(value)]
        return words


def parse_settings(argv: Sequence[str]) -> TrainSettings:
    """Parse the trainer's command line; --plan and --run-dir default to FCP_PLAN and FCP_RUN_DIR."""
    import argparse  # here: every `fcp` command imports this module

    parser = argparse.ArgumentParser(
        prog="python -m fcp_cli.training.train",
        description="Train a model under a plan. Run it with torchrun, one process per rank; 'fcp launch' does.",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainSettings)
    for f in fields(TrainSettings):
        parser.add_argument(f"--{f.name.replace('_', '-')}", **_argument(f.name, hints[f.name], f.default))
    given = vars(parser.parse_args(argv))
    return TrainSettings(**{**given, "manifest": tuple(given["manifest"])})


def _argument(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """Return the argparse arguments of a field."""
    if hint is bool:
        from argparse import BooleanOptionalAction

        return {"action": BooleanOptionalAction, "default": default}
    kind = str if get_origin(hint) is Literal else next((part for part in get_args(hint) if part is not NoneType), hint)
    if get_origin(hint) is tuple:
        return {"type": kind, "nargs": "*", "default": default, "help": "default: none"}
    if default is not MISSING:
        return {"type": kind, "default": default, "help": "default: %(default)s"}
    fallback = os.environ.get({"plan": "FCP_PLAN", "run_dir": "FCP_RUN_DIR"}.get(name, ""))
    return {"type": kind, "required": fallback is None, "default": kind(fallback) if fallback else None}


def require_libraries(recipe: Recipe, settings: TrainSettings) -> None:
    """Raise UsageError if a package that the settings need is missing."""
    if recipe.lora is not None:
        _require("peft", flag="--lora", install=pip_install("finetune", "peft"))
    if settings.wandb is not None:
        _require("wandb", flag="--wandb", install="pip install wandb")


def _require(package: str, *, flag: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{flag} needs {package}, which is not installed; run: {install}")
