"""An unmodified Trainer script alone, with its better habits, and under a plan: seconds, losses and evaluation.

    python -m benchmarks.trainer_gain [--ranks 2] [--repeats 2]

Trains `examples/hugging_face/code_model.py` on CPU ranks that compute for real, one job after another: padded batches,
rows grouped by length, padding-free batches, and padded batches under fcp, which plans while the job trains. Seconds
are those of `trainer.train()`, and of the whole command with its imports; the quickest of the repeats counts. Needs
free cores: one for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fcp_cli.cli.paced import without_settings
from fcp_cli.util.files import shipped
from fcp_cli.util.processes import torchrun_argv

_SCRIPT = shipped("examples") / "hugging_face" / "code_model.py"
_HABITS = {
    "`torchrun`, padded batches": "padded",
    "`torchrun`, `group_by_length`": "group_by_length",
    "`torchrun`, padding-free": "padding_free",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that has ended; `result` is what its script wrote, `seconds` those of the whole command."""

    result: dict[str, Any]
    seconds: float

    @property
    def training_seconds(self) -> float:
        return float(self.result["seconds"])


def run(command: list[str], folder: Path) -> Job:
    """Run a job in a folder, in which it writes `result.json`."""
    started = time.monotonic()
    environment = without_settings(os.environ)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"a job ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return Job(result=json.loads((folder / "result.json").read_text()), seconds=seconds)


def quickest(command: list[str], repeats: int) -> Job:
    """Return the job with the shortest training, each in a folder of its own."""
    jobs = []
    for _ in range(repeats):
        with TemporaryDirectory(prefix="fcp-gain-") as folder:
            jobs.append(run(command, Path(folder)))
    return min(jobs, key=lambda job: job.training_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks")
    parser.add_argument("--repeats", type=int, default=2, help="jobs of each kind")
    options = parser.parse_args()
    torchrun = torchrun_argv(options.ranks)
    commands = {name: [*torchrun, str(_SCRIPT), "result.json", kind] for name, kind in _HABITS.items()}
    fcp = [sys.executable, "-m", "fcp_cli", "--no-config", "launch", f"--ranks={options.ranks}", "--run-dir=run", "--"]
    commands["**`fcp launch`**, padded batches"] = [*fcp, str(_SCRIPT), "result.json", "padded"]
    jobs = {name: quickest(command, options.repeats) for name, command in commands.items()}
    ours = list(jobs.values())[-1]
    losses = ours.result["losses"]
    print("| job | training | whole command | relative to fcp | last loss | evaluation |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, job in jobs.items():
        print(
            f"| {name} | {job.training_seconds:.1f} s | {job.seconds:.1f} s "
            f"| {job.training_seconds / ours.training_seconds:.2f}x "
            f"| {job.result['losses'][-1]:.5f} | {job.result['eval_loss']:.5f} |"
        )
    alone = next(iter(jobs.values())).result["losses"]
    difference = max(abs(one - other) / abs(one) for one, other in zip(alone, losses, strict=True))
    print(f"\nLargest relative difference of a loss under fcp from the same batches alone: {difference:.1e}.")


if __name__ == "__main__":
    main()
