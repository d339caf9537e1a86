"""The checkpoint that a script's trainer wrote because its job was asked to stop: `stopped.json` of a run."""

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
    """A stopped training.

    Attributes:
        checkpoint: folder of the trainer's own checkpoint, absolute.
        step: optimizer steps that it holds.
    """

    checkpoint: str
    step: NonNegativeCount


def note_stopped(run_dir: Path, stopped: StoppedScript) -> None:
    """Write where a stopped training continues."""
    write_text_atomically(RunPaths(run_dir=run_dir).stopped, json.dumps(asdict(stopped)))


def read_stopped(run_dir: Path) -> StoppedScript | None:
    """Return where the stopped training of a run continues; None: it was not stopped, or has ended since."""
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
    """Remove the note of where a stopped training continues, if there is one: it has ended by itself since."""
    with suppress(FileNotFoundError):
        RunPaths(run_dir=run_dir).stopped.unlink()
