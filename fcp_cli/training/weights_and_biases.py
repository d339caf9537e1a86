"""Curves of a run in Weights & Biases, through its own library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcp_cli.training.tensorboard import scalars_of


class WandbRun:
    """Logs TensorBoard's scalars, too; under `WANDB_MODE=offline` into the run directory only.

    Args:
        project: of Weights & Biases.
        run_dir: gives the run its name, and a resumed run the identity of the one before.
        run: the record that begins the metrics.
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
        # By the step of the run: a resumed one makes some again, which W&B's own counter would not take.
        self._run.define_metric("fcp/step")
        self._run.define_metric("fcp/*", step_metric="fcp/step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"fcp/step": record["step"], **{f"fcp/{key}": one for key, one in scalars_of(record).items()}})

    def close(self) -> None:
        self._run.finish()
