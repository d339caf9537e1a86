"""Shows training progress on a terminal, TensorBoard and Weights & Biases, from the metrics' records.

A terminal gets a live line, other output a plain line every few steps; the trainer and `fcp watch` show the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fcp_cli.cost.model import windowed_pairs
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.state import backward_of
from fcp_cli.models.cluster import known_cluster, load_cluster
from fcp_cli.models.model import ModelSpec, forward_operations
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import EvalRecord, MetricsRecord, StepRecord
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util.console import human
from fcp_cli.util.words import clock, counted, short_count, short_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live


_STEPS_FOR_PACE = 20


def progress_line(record: StepRecord, *, steps: int, seconds_left: float | None) -> str:
    """Describe a step, in 80 columns for up to 1,000 steps and an hour; beyond, the end may be truncated.

    MFU, if known, and peak memory per rank come last.
    """
    seconds = record["seconds"]
    parts = [
        f"step {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])}",
        f"{short_count(record['tokens'] / seconds)} tok/s",
        f"{short_seconds(seconds)}s (plan {short_seconds(record['predicted_seconds'])})",
        f"idle {record['idle_fraction']:.0%}",
    ]
    if bad_rows := record.get("bad_rows"):
        parts.append(counted(len(bad_rows), "bad row"))
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    if (mfu := record.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.0%}")
    if peak := record.get("peak_memory_bytes"):
        parts.append(f"{peak / 1e9:.3g} GB")
    return "  ".join(parts)


def evaluation_line(record: EvalRecord, *, steps: int) -> str:
    """Describe an evaluation: loss per trained token, in total and by sequence length."""
    parts = [
        f"evaluation {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])} of {short_count(record['tokens'])} tokens",
        *(f"up to {one['up_to_tokens']:,}: {_loss(one['loss'])}" for one in record["buckets"]),
        f"{short_seconds(record['seconds'])}s",
    ]
    return "  ".join(parts)


def _loss(value: float | None) -> str:
    return "nan" if value is None else format(value, ".4f")


class TrainingProgress:
    """Live display of a run. Feed it every record, and always close it.

    Args:
        console: output console.
        every: steps between plain lines; the first and last step are always printed.
    """

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._steps = 0
        self._first_step: int | None = None
        self._pace: deque[float] = deque(maxlen=_STEPS_FOR_PACE)
        self._live: Live | None = None

    def feed(self, record: MetricsRecord) -> None:
        if record["kind"] == "run":
            self._steps = record.get("steps", 0)
            self._first_step = None
        elif record["kind"] == "step":
            self._show(record)
        elif record["kind"] == "eval":
            line = evaluation_line(record, steps=self._steps)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # printed above the live line

    def _show(self, record: StepRecord) -> None:
        if not record.get("warm_up"):
            self._pace.append(record["seconds"])
        step, pace = record["step"], self._pace
        seconds_left = (self._steps - step - 1) * sum(pace) / len(pace) if pace else None
        line = progress_line(record, steps=self._steps, seconds_left=seconds_left)
        if self._console.is_terminal:
            self._update_live(line)
        elif self._first_step is None or (step + 1) % self._every == 0 or step + 1 == self._steps:
            self._console.print(line, markup=False, soft_wrap=True)
        if self._first_step is None:
            self._first_step = step

    def _update_live(self, line: str) -> None:
        from rich.live import Live
        from rich.text import Text

        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(text, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Keep the last line on screen and release the terminal."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None


_SCALARS = ("loss", "grad_norm", "learning_rate", "seconds", "predicted_seconds", "idle_fraction")
_NEWER_SCALARS = ("tokens_per_second", "mfu", "peak_memory_bytes")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite scalars of a `step` or `eval` record."""
    if record["kind"] == "eval":
        of_lengths = {f"eval_loss/up_to_{one['up_to_tokens']}": one["loss"] for one in record["buckets"]}
        found = {"eval_loss": record["loss"], **of_lengths}
    else:
        found = {name: record[name] for name in _SCALARS}
        found |= {name: record.get(name) for name in _NEWER_SCALARS}
    return {name: value for name, value in found.items() if value is not None}


class Scalars:
    """Writes scalars of step records to TensorBoard; does nothing if it is not installed."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._writer is not None:
            for name, value in scalars_of(record).items():
                self._writer.add_scalar(f"fcp/{name}", value, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbRun:
    """Logs the same scalars to Weights & Biases; with `WANDB_MODE=offline` only into the run directory.

    Args:
        project: Weights & Biases project.
        run_dir: provides the run's name; a resumed run in the same directory continues its Weights & Biases run.
        run: first record of the metrics: the run's configuration.
    """

    def __init__(self, project: str, run_dir: Path, run: Mapping[str, Any]) -> None:
        import wandb

        place = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
        self._run: Any = wandb.init(
            project=project,
            name=run_dir.name,
            id=f"{run_dir.name}-{place}",
            resume="allow",
            dir=str(run_dir),
            config={name: value for name, value in run.items() if name not in ("format", "kind")},
        )
        # Indexed by training step: a resumed run repeats steps, which W&B's own counter would reject.
        self._run.define_metric("fcp/step")
        self._run.define_metric("fcp/*", step_metric="fcp/step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"fcp/step": record["step"], **{f"fcp/{key}": one for key, one in scalars_of(record).items()}})

    def close(self) -> None:
        self._run.finish()


class TrainingReport:
    """Rank 0's outputs; feed them each metrics record, beginning with the `run` record."""

    def __init__(self, settings: TrainSettings, *, first_step: int) -> None:
        self._settings = settings
        self._curves: list[Scalars | WandbRun] = [
            Scalars(RunPaths(run_dir=settings.run_dir).tensorboard, first_step=first_step)
        ]
        self._progress = None if settings.quiet else TrainingProgress(human(), every=settings.log_every)

    def feed(self, record: dict[str, Any]) -> None:
        if record["kind"] == "run" and self._settings.wandb is not None:
            self._curves.append(WandbRun(self._settings.wandb, self._settings.run_dir, record))
        elif record["kind"] != "run":
            for curves in self._curves:
                curves.write(record)
        if self._progress is not None:
            self._progress.feed(cast(MetricsRecord, record))  # written by this process

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        for curves in self._curves:
            curves.close()


# Facts of the `run` record, and model FLOPs utilization (MFU): a step's operations relative to the devices' peak.

_HALF_PRECISIONS = ("bf16", "amp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A device's peak performance from its data sheet.

    Attributes:
        flops: dense 16-bit FLOP/s.
        source: shipped cluster description it is from.
    """

    flops: float
    source: str


def peak_of(device_name: str, recipe: Recipe) -> Peak | None:
    """Return a device's peak; None if unknown, or if the recipe's matrix products are not 16-bit."""
    name = known_cluster(device_name)
    if name is None or recipe.precision not in _HALF_PRECISIONS:
        return None
    return Peak(flops=load_cluster(name).peak_flops, source=name)


def model_flops(spec: ModelSpec, recipe: Recipe, lengths: np.ndarray) -> float:
    """Count the language model's operations in a step, without recomputation (Chowdhery et al., PaLM).

    Each matrix parameter costs two operations per token in forward, two for the input gradient if an earlier weight is
    trained, and two for the weight gradient if it is trained. A token attends to half of its sequence. Encoders are not
    counted.

    Args:
        spec: the model.
        recipe: determines the trained part.
        lengths: [sequences] lengths in tokens.
    """
    forward, backward, length = forward_operations(spec), backward_of(spec, recipe), lengths.astype(np.float64)
    attention = forward.attention_per_token2 * float(np.square(length).sum())
    if spec.window_tokens is not None:
        attention += forward.window_per_token2 * float(windowed_pairs(length, spec.window_tokens).sum())
    matrices = forward.linear_per_token * float(length.sum())
    return matrices * backward.language.total() + (1 + 2 * backward.layers) * attention


def utilisation(
    spec: ModelSpec, recipe: Recipe, plan: StepPlan, *, seconds: float, peak: Peak | None, ranks: int
) -> float | None:
    """Return the MFU of a step, or None if the peak is unknown."""
    if peak is None:
        return None
    return model_flops(spec, recipe, plan.lengths) / (seconds * ranks * peak.flops)


def run_facts(settings: TrainSettings, *, steps: int, parameters: int, peak: Peak | None = None) -> dict[str, Any]:
    """Return facts about the run that its plan lacks; `steps` is its last step."""
    return {
        "model": settings.model,
        "parameters": parameters,
        "peak_flops": None if peak is None else peak.flops,
        "peak_flops_of": None if peak is None else peak.source,
        "steps": steps,
        "settings": settings.argv(),
    }
