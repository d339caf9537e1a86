"""Output of rank 0 during training besides metrics: TensorBoard, Weights & Biases, progress."""

from __future__ import annotations

from typing import Any, cast

from fcp_cli.console import human
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics.metrics_record import MetricsRecord
from fcp_cli.training.curves import Scalars, WandbRun
from fcp_cli.training.progress import TrainingProgress
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.utilisation import Peak


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
