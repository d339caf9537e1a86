"""Handles Ctrl-C in a trainer that follows a plan: the step finishes, a checkpoint is written, and the script exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from fcp_cli.runs.stopped_script import StoppedScript, forget_stopped, note_stopped, read_stopped
from fcp_cli.runtime.session.session import Session

RUN_DIR_VARIABLE = "FCP_RUN_DIR"


class StopAtStepEnd(TrainerCallback):
    """Stops a trainer at the end of the step in which any rank received SIGINT, which `fcp launch` sends to stop.

    SIGTERM keeps its default action, since torchrun sends it to ranks that wait for a failed one.

    Args:
        trainer: trainer to which the callback is added.
        session: session of this rank; all ranks agree at the end of every step.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self.has_stopped = False
        self._trainer, self._world, self._source = trainer, session.world, session.source
        self._is_asked = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        trainer.add_callback(self)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        signal.signal(number, signal.SIG_DFL)  # a second signal kills the process

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        asked = torch.tensor([int(self._is_asked)], dtype=torch.int64)
        self._world.start_sum(asked).wait()
        if int(asked):
            self.has_stopped = control.should_save = control.should_training_stop = True
            if self._source is not None:
                self._source.is_stopped = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if self.has_stopped and run_dir and self._world.rank == 0:
            folder = Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"
            note_stopped(Path(run_dir), StoppedScript(checkpoint=str(folder), step=state.global_step))

    def release(self) -> None:
        """Restore the previous SIGINT handler."""
        self._trainer.remove_callback(self)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def end(self) -> None:
        """Exit the script if it was stopped, once every rank has written its part of the checkpoint."""
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if self.has_stopped:
            self._world.start_sum(torch.zeros(1, dtype=torch.int64)).wait()
            raise SystemExit(128 + signal.SIGINT)
        if run_dir and self._world.rank == 0:
            forget_stopped(Path(run_dir))


def checkpoint_to_resume(given: Any) -> Any:
    """Return the checkpoint to resume from: the script's, else that of the stopped run."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    stopped = read_stopped(Path(run_dir)) if not given and run_dir else None
    if stopped is None:
        return given
    if os.environ.get("RANK", "0") == "0":
        print(f"fcp: resuming after step {stopped.step} from {stopped.checkpoint}", file=sys.stderr, flush=True)
    return stopped.checkpoint
