"""Logs a run's curves to TensorBoard, if installed, and Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
