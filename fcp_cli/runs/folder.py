"""Where a run is kept, `runs/NAME-NNN`, and every path inside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")
_NUMBER = re.compile("[0-9]{1,18}")  # str.isdigit takes superscripts, too, which are no numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Every path below a run directory; made nowhere else."""

    run_dir: Path

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model in the form of a Hugging Face checkpoint."""
        return self.run_dir / "model"

    @property
    def origin(self) -> Path:
        """Configuration, tokenizer and processor of the checkpoint that training began with."""
        return self.run_dir / "origin"

    @property
    def tensorboard(self) -> Path:
        return self.run_dir / "tensorboard"

    @property
    def logs(self) -> Path:
        """One folder per start, with the output of the launcher and each rank."""
        return self.run_dir / "logs"

    @property
    def plan(self) -> Path:
        """A copy of the plan that the latest start follows."""
        return self.run_dir / "plan.parquet"

    @property
    def online(self) -> Path:
        """Settings of a job that plans while it trains."""
        return self.run_dir / "online.json"

    @property
    def planning(self) -> Path:
        """Settings of a job whose training loop has its plan made."""
        return self.run_dir / "planning.json"

    @property
    def stopped(self) -> Path:
        """The checkpoint of a script whose trainer was asked to stop; see `runs.stopped_script`."""
        return self.run_dir / "stopped.json"

    @property
    def evaluation_plan(self) -> Path:
        """The plan over the held-out rows, if the run made it."""
        return self.run_dir / "eval-plan.parquet"

    @property
    def profile(self) -> Path:
        """The cost profile that the plan was made with."""
        return self.run_dir / "profile.yaml"

    @property
    def versions(self) -> Path:
        """Installed versions where the run was started, as `fcp env --json` prints them."""
        return self.run_dir / "versions.json"

    @property
    def launch(self) -> Path:
        """The commands and environment of the latest start, as `--json` prints them."""
        return self.run_dir / "launch.json"

    def owner_of(self, node: int) -> Path:
        """The process that runs a node's part of the job, and how the latest ended; see `runs.owner`."""
        return self.run_dir / ("owner.json" if node == 0 else f"owner-node{node}.json")


def from_here(path: Path) -> Path:
    """Return a path below the working directory as it would be typed there."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def next_run_dir(name: str, *, runs: Path = RUNS) -> Path:
    """Return the first `runs/NAME-NNN` after all that exist; a new run never touches an old one."""
    taken = [path.name.removeprefix(f"{name}-") for path in runs.glob(f"{name}-*")]
    numbers = [int(number) for number in taken if _NUMBER.fullmatch(number)]
    return runs / f"{name}-{max(numbers, default=0) + 1:03d}"
