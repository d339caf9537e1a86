"""TensorBoard scalars, where tensorboard is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCALARS = ("loss", "grad_norm", "learning_rate", "seconds", "predicted_seconds", "idle_fraction")


class Scalars:
    """A writer of the scalars of each step record; it does nothing where tensorboard is missing."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for name in _SCALARS:
            if record[name] is not None:
                self._writer.add_scalar(f"fcp/{name}", record[name], record["step"])
        self._writer.add_scalar("fcp/tokens_per_second", record["tokens"] / record["seconds"], record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
