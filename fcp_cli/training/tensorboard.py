"""TensorBoard scalars, where tensorboard is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCALARS = ("loss", "grad_norm", "learning_rate", "seconds", "predicted_seconds", "idle_fraction")
_NEWER_SCALARS = ("tokens_per_second", "mfu", "peak_memory_bytes")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of a `step` or an `eval` record, without those that are not finite."""
    if record["kind"] == "eval":
        of_lengths = {f"eval_loss/up_to_{one['up_to_tokens']}": one["loss"] for one in record["buckets"]}
        found = {"eval_loss": record["loss"], **of_lengths}
    else:
        found = {name: record[name] for name in _SCALARS}
        found |= {name: record.get(name) for name in _NEWER_SCALARS}
    return {name: value for name, value in found.items() if value is not None}


class Scalars:
    """A writer of the scalars of each step record; it does nothing where tensorboard is missing."""

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
