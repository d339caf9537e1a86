"""Progress of a running job, from its metrics."""

from __future__ import annotations

from datetime import datetime, timezone

from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.metrics.metrics_reader import MetricsTail
from fcp_cli.runs.summary import RunSummary
from fcp_cli.training.progress import TrainingProgress


class RunProgress:
    """Follower of a run's metrics, from now on.

    Args:
        paths: paths of the run.
        progress: prints new steps; None: only the totals are kept.

    Attributes:
        paths: paths of the run.
        summary: totals of this start.
    """

    def __init__(self, paths: RunPaths, progress: TrainingProgress | None) -> None:
        self.summary = RunSummary()
        self.paths, self._progress = paths, progress
        self._tail = MetricsTail(paths.metrics, since=datetime.now(timezone.utc).isoformat())

    def poll(self) -> None:
        """Read and print new steps; call it repeatedly."""
        for record in self._tail.poll():
            self.summary.feed(record)
            if self._progress is not None:
                self._progress.feed(record)

    def close(self) -> None:
        """Print the remaining steps, and release the terminal."""
        self.poll()
        if self._progress is not None:
            self._progress.close()
