"""The settings of the bundled trainer, and how they travel through a torchrun command line. Imports no torch.

Fields marked `Opt` are options of `fcp launch`, too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from fcp_cli.errors import UsageError
from fcp_cli.extras import pip_install
from fcp_cli.options import MOST_WORKERS, Opt, check_limits
from fcp_cli.recipe import (
    Recipe,
    RecipeRequest,
    check_recipe,
    recipe_to_follow,
)
from fcp_cli.runtime.agreement.grad_ring import GradRingDtype
from fcp_cli.runtime.guards.on_nan import OnNan
from fcp_cli.tuning import check_tuning

BadRows: TypeAlias = Literal["error", "skip"]
Device: TypeAlias = Literal["auto", "cpu", "cuda", "npu"]
LrSchedule: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings(RecipeRequest):
    """Settings of one run. The plan decides data order, batch sizes and ranks; nothing here repeats it.

    Attributes:
        plan: plan file.
        model: name of a shipped model, a model YAML, a Hugging Face config.json, or the folder of a checkpoint.
        weights: folder of the Hugging Face checkpoint to start from; None starts from random weights.
        run_dir: folder for metrics and checkpoints, shared by all nodes.
        manifest: manifest of the plan, whose source holds the tokens, or all that it mixes; none trains on synthetic
            tokens.
        length_column: the manifest's column that was planned.
        bad_rows: action on a row whose images or videos fail to decode: stop, or skip and count it.
        decode_workers: processes of each rank that decode pictures; 0 decodes in the trainer's own.
        random_weights: the start from no checkpoint was asked for, although the model may be one.
        export_every: steps between exports of the model in Hugging Face form to the run directory's `model`; it is
            exported at the end in any case.
        steps: stop after this many steps in all; None runs the whole plan.
        learning_rate: peak, reached after `warmup_steps`; below 1 they are a share of the schedule, as in transformers.
        lr_schedule: decay of the rate from there to `min_learning_rate_ratio` of the peak; `wsd` stays at the peak
            until it falls over the last `wsd_decay_ratio` of the steps.
        decay_steps: the steps of the schedule; None means the plan's. It does not depend on `steps`, so that a run
            stopped early and resumed follows the same schedule.
        max_grad_norm: global gradient norm to clip to; 0 turns clipping off.
        on_nan: action on a step whose loss, or gradient norm, is NaN or infinite.
        zero, shard_ranks, reduce, precision, recompute, loss, offload, freeze_vision, lora, freeze: the fields of the
            recipe; `auto`, None and False leave them to the plan (`TrainSettings.recipe`).
        eval_manifest, eval_plan: held-out rows and their plan, which is made in the run directory if None.
        eval_every: steps between two evaluations; there is one at the end in any case.
        grad_ring_dtype: type in which gradients of 16-bit keys and values travel around rings.
        checkpoint_every: steps between checkpoints; 0 saves only at the end and on Ctrl-C.
        keep: the newest so many checkpoints stay.
        accept_unrecorded: resume although the metrics end before the checkpoint does.
        async_save: copy the state, and write the checkpoint in the background.
        wandb: project of Weights & Biases for the curves, in addition to TensorBoard.
        log_every: steps between two lines of progress if there is no terminal.
        quiet: no progress; the launcher shows it from the metrics.
    """

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
            planned: the recipe that the plan records.
            sync: the sync of the plan.
            device: kind of device that the ranks run on.
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
        """Return the arguments that `parse_settings` reads back, without those at their defaults."""
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
    given = vars(parser.parse_args(argv))
    return TrainSettings(**{**given, "manifest": tuple(given["manifest"])})


def _argument(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """Return how argparse reads one field."""
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
    """Check that the packages of a run's settings can be imported."""
    if recipe.lora is not None:
        _require("peft", flag="--lora", install=pip_install("finetune", "peft"))
    if settings.wandb is not None:
        _require("wandb", flag="--wandb", install="pip install wandb")


def _require(package: str, *, flag: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{flag} needs {package}, which is not installed; run: {install}")
