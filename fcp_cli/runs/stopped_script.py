"""The checkpoint that a script's trainer wrote when its job was stopped: `stopped.json` of a run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.reading.documents import read_object
from fcp_cli.runs.folder import RunPaths
from fcp_cli.validation import NonNegativeCount, validated


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppedScript:
    """A stopped training script.

    Attributes:
        checkpoint: absolute path of the trainer's checkpoint.
        step: number of optimizer steps trained.
    """

    checkpoint: str
    step: NonNegativeCount


def note_stopped(run_dir: Path, stopped: StoppedScript) -> None:
    """Record the checkpoint from which the script can resume."""
    write_text_atomically(RunPaths(run_dir=run_dir).stopped, json.dumps(asdict(stopped)))


def read_stopped(run_dir: Path) -> StoppedScript | None:
    """Return the checkpoint from which the script can resume, or None if it was not stopped."""
    path = RunPaths(run_dir=run_dir).stopped
    if not path.is_file():
        return None
    found = validated(read_object(path, error=RunError), StoppedScript, where=str(path), error=RunError)
    if not Path(found.checkpoint).is_dir():
        raise RunError(
            f"this run was stopped, and its checkpoint {found.checkpoint} is gone; remove {path} to train from the "
            "script's own beginning, or start a new run without --run-dir"
        )
    return found


def forget_stopped(run_dir: Path) -> None:
    """Remove the record of a stopped script, since it has now finished."""
    with suppress(FileNotFoundError):
        RunPaths(run_dir=run_dir).stopped.unlink()
