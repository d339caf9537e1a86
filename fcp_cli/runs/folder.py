"""The run directory, `runs/NAME-NNN`, and every path inside it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")
_NUMBER = re.compile("[0-9]{1,18}")  # str.isdigit would accept superscripts


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """All paths in a run directory; no other module builds them."""

    run_dir: Path

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model, as a Hugging Face checkpoint."""
        return self.run_dir / "model"

    @property
    def origin(self) -> Path:
        """Configuration, tokenizer and processor of the initial checkpoint."""
        return self.run_dir / "origin"

    @property
    def tensorboard(self) -> Path:
        return self.run_dir / "tensorboard"

    @property
    def logs(self) -> Path:
        """A folder per start, with the output of the launcher and of each rank."""
        return self.run_dir / "logs"

    @property
    def plan(self) -> Path:
        """Copy of the plan that the latest start follows."""
        return self.run_dir / "plan.parquet"

    @property
    def online(self) -> Path:
        """Settings of a job that plans while it trains."""
        return self.run_dir / "online.json"

    @property
    def planning(self) -> Path:
        """Settings for a training loop that requests its plan."""
        return self.run_dir / "planning.json"

    @property
    def stopped(self) -> Path:
        """Checkpoint of a script whose trainer was stopped; see `runs.stopped_script`."""
        return self.run_dir / "stopped.json"

    @property
    def evaluation_plan(self) -> Path:
        """Plan for the held-out rows, if the run made one."""
        return self.run_dir / "eval-plan.parquet"

    @property
    def profile(self) -> Path:
        """Cost profile of the plan."""
        return self.run_dir / "profile.yaml"

    @property
    def versions(self) -> Path:
        """Installed versions at the start, as `fcp env --json` prints them."""
        return self.run_dir / "versions.json"

    @property
    def launch(self) -> Path:
        """Commands and environment of the latest start, as `--json` prints them."""
        return self.run_dir / "launch.json"

    def owner_of(self, node: int) -> Path:
        """The launcher process of a node, and how the latest job ended; see `runs.owner`."""
        return self.run_dir / ("owner.json" if node == 0 else f"owner-node{node}.json")


def from_here(path: Path) -> Path:
    """Return a path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def next_run_dir(name: str, *, runs: Path = RUNS) -> Path:
    """Return the next unused `runs/NAME-NNN`; a new run never reuses a directory."""
    taken = [path.name.removeprefix(f"{name}-") for path in runs.glob(f"{name}-*")]
    numbers = [int(number) for number in taken if _NUMBER.fullmatch(number)]
    return runs / f"{name}-{max(numbers, default=0) + 1:03d}"
