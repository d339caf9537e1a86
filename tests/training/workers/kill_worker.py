"""Kills whole jobs of four ranks and resumes them: `kill_worker.py FOLDER KILLS PORT`.

Ranks are forked from here, where everything is imported: a job starts in a second, and can be killed often. Files of
checkpoints are written slowly, so that much of each step is a save in the background. A job that is to be killed never
writes its last checkpoint: however late this process looks, the job has not ended.

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

from fcp_cli.integrations import transformers as integration
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.training import checkpoint, train, trainer, weights
from tests.patience import PATIENCE_SECONDS
from tests.ports import unused_port
from tests.training.small_runs import NUM_RANKS

assert integration
assert weights
assert trainer  # what the ranks need is imported before they are forked
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

STEPS = 6
SLOW_SECONDS = 0.15  # of each file
SETTINGS = ("--model", "qwen3-tiny", "--precision", "fp64", "--learning-rate", "3e-3", "--steps", str(STEPS), "--quiet")


write_file = checkpoint._write_file


def write_slowly(path: Path, *rest: Any, last: float = SLOW_SECONDS) -> Any:
    time.sleep(last if f"step-{STEPS:08d}" in str(path) else SLOW_SECONDS)
    return write_file(path, *rest)


class Job:
    """A running job: its ranks, which never end if they are to be killed."""

    def __init__(self, folder: Path, name: str, *words: str, ends: bool = True) -> None:
        self.run_dir = folder / name
        self._write = write_slowly if ends else partial(write_slowly, last=PATIENCE_SECONDS)
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
        setattr(checkpoint, "_write_file", self._write)  # noqa: B010
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


def main(folder: Path, kills: int) -> None:
    begin = time.monotonic()
    Job(folder, "whole").end()
    seconds = time.monotonic() - begin
    draw = random.Random(kills)
    moments = []
    for number in range(kills):
        is_new = not (folder / "killed" / "metrics.jsonl").exists()
        job = Job(folder, "killed", *(() if is_new else ("--resume",)), ends=False)
        saved = job.run_dir / "checkpoints"
        end = time.monotonic() + draw.uniform(0.0, 0.4) * seconds
        if number == 0:  # one for certain while ranks write, after a checkpoint that they resume from
            job.kill_when(partial(is_saving, saved))
        else:
            job.kill_when(lambda end=end: time.monotonic() > end)  # type: ignore[misc]
        moments.append([path.name for path in saved.glob(".*.partial")])
    shutil.copytree(folder / "killed", folder / "cut")
    Job(folder, "killed", "--resume").end()
    (folder / "moments.json").write_text(json.dumps(moments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
