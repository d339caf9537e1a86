"""Kills whole jobs of four ranks and resumes them: `kill_worker.py FOLDER KILLS PORT`.

Ranks are forked from here, where everything is imported: a job starts in a second, and can be killed often. Files of
checkpoints are written slowly, so that much of each step is a save in the background.

    whole    a run that nobody kills
    killed   killed `KILLS` times, each time resumed, then left to end
    cut      a copy of it when it was killed for the last time
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fcp_cli.runs.checkpoint_header import checkpoints
from fcp_cli.training import checkpoint, models, train, trainer
from tests.ports import unused_port
from tests.training.small_runs import NUM_RANKS

assert models
assert trainer  # what the ranks need is imported before they are forked
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

STEPS = 10
SLOW_SECONDS = 0.15  # of each file
SETTINGS = ("--model", "qwen3-tiny", "--precision", "fp64", "--learning-rate", "3e-3", "--steps", str(STEPS), "--quiet")


write_file = checkpoint._write_file


def write_slowly(*arguments: Any) -> Any:
    time.sleep(SLOW_SECONDS)
    return write_file(*arguments)


setattr(checkpoint, "_write_file", write_slowly)  # noqa: B010


class Job:
    """A running job: its ranks."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.run_dir = folder / name
        port = str(unused_port())
        argv = ["--plan", str(folder / "plan.parquet"), "--manifest", str(folder / "lengths.parquet"), *SETTINGS]
        self.ranks = [self._fork(rank, port, [*argv, "--run-dir", str(self.run_dir), *words]) for rank in range(4)]

    def _fork(self, rank: int, port: str, argv: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
        status = 1
        try:
            status = train.main([*argv, "--checkpoint-every", "1", "--keep", "3"])
        finally:
            sys.stderr.flush()
            os._exit(status)

    def kill_when(self, condition: Callable[[], bool]) -> None:
        """Kill all ranks at a moment."""
        while not condition():
            assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a rank ended before it was killed"
            time.sleep(0.005)
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in self.ranks:
            os.waitpid(pid, 0)

    def end(self) -> None:
        for _ in self.ranks:
            assert os.waitpid(-1, 0)[1] == 0


def is_saving(saved: Path) -> bool:
    return bool(checkpoints(saved)) and any(saved.glob(".*.partial/*"))


def is_past(end: float, saved: Path) -> bool:
    """Return whether the moment has come, or the job, quicker than the first, is near its end."""
    return time.monotonic() > end or any(path.name >= "step-00000007" for path in saved.glob("step-*"))


def main(folder: Path, kills: int) -> None:
    begin = time.monotonic()
    Job(folder, "whole").end()
    seconds = time.monotonic() - begin
    draw = random.Random(kills)
    moments = []
    for number in range(kills):
        is_new = not (folder / "killed" / "metrics.jsonl").exists()
        job = Job(folder, "killed", *(() if is_new else ("--resume",)))
        saved = job.run_dir / "checkpoints"
        end = time.monotonic() + draw.uniform(0.0, 0.4) * seconds  # a machine that was busy before may be quick now
        if number == 0:  # one for certain while ranks write, after a checkpoint that they resume from
            job.kill_when(partial(is_saving, saved))
        else:
            job.kill_when(partial(is_past, end, saved))
        moments.append([path.name for path in saved.glob(".*.partial")])
    shutil.copytree(folder / "killed", folder / "cut")
    Job(folder, "killed", "--resume").end()
    (folder / "moments.json").write_text(json.dumps(moments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
