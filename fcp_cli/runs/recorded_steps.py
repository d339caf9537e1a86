"""Checks that a run's metrics cover the steps of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoints.checkpoint_header import checkpoints, read_header
from fcp_cli.runs.folder import RunPaths, from_here
from fcp_cli.runs.summary import summary_of


def recorded_steps(metrics: Path) -> int:
    """Return the number of finished steps according to the metrics; 0 without metrics."""
    last = summary_of(metrics).last
    return 0 if last is None else last["step"] + 1


def unrecorded(first: int, last: int) -> str:
    """Name a range of unrecorded steps, counted from 1 as in the progress display."""
    return f"step {last} is" if first == last else f"steps {first} to {last} are"


def require_recorded(checkpoint: Path, *, accepts: bool) -> None:
    """Check that the metrics record every step of the checkpoint.

    Args:
        checkpoint: the checkpoint to resume from.
        accepts: whether the user accepts a gap.
    """
    finished, paths = read_header(checkpoint).step, RunPaths(run_dir=checkpoint.parent.parent)
    recorded = recorded_steps(paths.metrics)
    if accepts or finished <= recorded:
        return
    late = [path for path in checkpoints(paths.checkpoints) if read_header(path).step > recorded]
    covered = [path.name for path in checkpoints(paths.checkpoints) if path not in late]
    again = f"from {covered[-1]}" if covered else "from the beginning"
    raise RunError(
        f"{from_here(checkpoint)} has finished {finished} steps, but {from_here(paths.metrics)} records {recorded}: "
        f"{unrecorded(recorded + 1, finished)} in no record; resume with --accept-unrecorded, or remove "
        f"{' and '.join(path.name for path in late)} to train them again {again}"
    )
