"""Follow the metrics of the job that runs: show its steps and its totals."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics.metrics_reader import MetricsTail
from fcp_cli.runs.summary import RunSummary
from fcp_cli.training.progress import TrainingProgress

_POLL_SECONDS = 1.0


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
        self._polled = 0.0

    def poll(self) -> None:
        """Show new steps, at most once a second; to be called often."""
        if time.monotonic() - self._polled > _POLL_SECONDS:
            self._show_new()

    def close(self) -> None:
        """Show the remaining steps, and release the terminal."""
        self._show_new()
        if self._progress is not None:
            self._progress.close()

    def _show_new(self) -> None:
        self._polled = time.monotonic()
        for record in self._tail.poll():
            self.summary.feed(record)
            if self._progress is not None:
                self._progress.feed(record)
