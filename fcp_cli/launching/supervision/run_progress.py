"""Follow the metrics of the job that runs: show its steps and its totals."""

from __future__ import annotations

from datetime import datetime, timezone

from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics.metrics_reader import MetricsTail
from fcp_cli.runs.summary import RunSummary
from fcp_cli.training.progress import TrainingProgress


class RunProgress:
    """The metrics of a start that begins now.

    Args:
        paths: the paths of the run.
        progress: shows new steps; None: steps are only added up.

    Attributes:
        paths: the paths of the run.
        summary: the summary of this start.
    """

    def __init__(self, paths: RunPaths, progress: TrainingProgress | None) -> None:
        self.summary = RunSummary()
        self.paths, self._progress = paths, progress
        self._tail = MetricsTail(paths.metrics, since=datetime.now(timezone.utc).isoformat())

    def poll(self) -> None:
        """Show new steps; to be called often."""
        for record in self._tail.poll():
            self.summary.feed(record)
            if self._progress is not None:
                self._progress.feed(record)

    def close(self) -> None:
        """Show the remaining steps, and release the terminal."""
        self.poll()
        if self._progress is not None:
            self._progress.close()
