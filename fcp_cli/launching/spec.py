"""What a launch is: one frozen value, from which every command is made by pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Environment of the job; the runtime inside the script reads them.
PLAN_VARIABLE = "FCP_PLAN"
METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"

TRAINER = ("-m", "fcp_cli.training.train")


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
    def tensorboard(self) -> Path:
        return self.run_dir / "tensorboard"

    @property
    def logs(self) -> Path:
        """One folder per start, named by its time; inside, what torchrun and each rank printed."""
        return self.run_dir / "logs"

    @property
    def launch(self) -> Path:
        """The commands and environment of the latest start, as `--json` prints them."""
        return self.run_dir / "launch.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """A job: what runs, on how many processes, where it writes.

    Attributes:
        plan: absolute path of the plan, the same on every node.
        run_dir: absolute path, shared by all nodes.
        num_nodes: machines; 1 runs here.
        processes_per_node: devices used on each; on one node this is the number of ranks.
        program: what torchrun starts: ("script.py",) or ("-m", "package.module").
        arguments: what the program is given.
        environment: set for the job beside FCP_PLAN, FCP_METRICS and FCP_RUN_DIR.
        master_addr, master_port: where the nodes meet; used only with several.
        log_dir: where each rank's output goes; None leaves it on the terminal.
        python: the interpreter that runs torchrun and the ranks.
    """

    plan: Path
    run_dir: Path
    num_nodes: int
    processes_per_node: int
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    master_addr: str = ""
    master_port: int = 29500
    log_dir: Path | None = None
    python: str

    @property
    def paths(self) -> RunPaths:
        return RunPaths(run_dir=self.run_dir)

    def job_environment(self) -> dict[str, str]:
        """What is set for the job on top of the environment that fcp itself has."""
        return {
            PLAN_VARIABLE: str(self.plan),
            METRICS_VARIABLE: str(self.paths.metrics),
            RUN_DIR_VARIABLE: str(self.run_dir),
            **self.environment,
        }
