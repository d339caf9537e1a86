"""Progress of rank 0 within a step: one small file that a long step replaces every few seconds, for displays."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.runs.state_file import read_state
from fcp_cli.validation import NonNegative, NonNegativeCount

FORMAT = "fcp-step-position/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPosition:
    """How far a step has come on rank 0, as far as its host knows: a device may be a little behind.

    Attributes:
        step: optimizer step, from 0.
        done: micro-batches of rank 0 that are done.
        microbatches: that it has in the step.
        planned_seconds: where in the step the plan has it by now.
        predicted_seconds: the plan's makespan of the step.
        began: Unix time of the step's start.
    """

    step: NonNegativeCount
    done: NonNegativeCount
    microbatches: NonNegativeCount
    planned_seconds: NonNegative
    predicted_seconds: NonNegative
    began: NonNegative

    @property
    def seconds(self) -> float:
        """Return how long ago the step began."""
        return max(0.0, time.time() - self.began)


def write_position(path: Path, position: StepPosition) -> None:
    """Replace the file of a run."""
    write_text_atomically(path, json.dumps({"format": FORMAT, **asdict(position)}) + "\n", durable=False)


def read_position(path: Path) -> StepPosition | None:
    """Read where a run is, or return None if it has had no long step or the file is damaged: only displays need it."""
    with suppress(RunError):
        return read_state(path, StepPosition, format_name=FORMAT)
    return None
