"""The output of rank 0 while it trains: metrics, TensorBoard scalars, progress."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from typing import Any

import torch

from fcp_cli.console import human
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics import FORMAT, EvaluationMeasurement, MetricsWriter, StepMeasurement, drop_steps_from
from fcp_cli.training.progress import TrainingProgress
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.tensorboard import Scalars
from fcp_cli.training.utilisation import Peak
from fcp_cli.training.weights_and_biases import WandbRun


def run_record(
    settings: TrainSettings,
    metadata: PlanMetadata,
    *,
    device: torch.device,
    first_step: int,
    steps: int,
    parameters: int,
    peak: Peak | None = None,
) -> dict[str, Any]:
    """Return the record that begins a run or its continuation; `steps` is where it will stop."""
    return {
        "format": FORMAT,
        "kind": "run",
        "plan_hash": metadata.plan_hash,
        "plan": str(settings.plan),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "sync": metadata.sync,
        "model": settings.model,
        "parameters": parameters,
        "device": device.type,
        "device_name": device_name(device),
        "peak_flops": None if peak is None else peak.flops,
        "peak_flops_of": None if peak is None else peak.source,
        "torch": torch.__version__,
        "started": datetime.now(timezone.utc).isoformat(),
        "first_step": first_step,
        "steps": steps,
        "settings": settings.argv(),
    }


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the CPU's architecture."""
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


class Report:
    """The open outputs of rank 0, made once it is known where the run begins."""

    def __init__(self, settings: TrainSettings, run: dict[str, Any]) -> None:
        paths = RunPaths(run_dir=settings.run_dir)
        drop_steps_from(paths.metrics, run["first_step"])
        self._metrics = MetricsWriter(paths.metrics)
        self._curves: list[Scalars | WandbRun] = [Scalars(paths.tensorboard, first_step=run["first_step"])]
        if settings.wandb is not None:
            self._curves.append(WandbRun(settings.wandb, settings.run_dir, run))
        self._progress = None if settings.quiet else TrainingProgress(human(), every=settings.log_every)
        self._metrics.write(run)
        if self._progress is not None:
            self._progress.feed(run)

    def step(self, measurement: StepMeasurement) -> None:
        self._write(measurement.record())

    def evaluation(self, measurement: EvaluationMeasurement) -> None:
        self._write(measurement.record())

    def _write(self, record: dict[str, Any]) -> None:
        self._metrics.write(record)
        for curves in self._curves:
            curves.write(record)
        if self._progress is not None:
            self._progress.feed(record)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        self._metrics.close()
        for curves in self._curves:
            curves.close()
