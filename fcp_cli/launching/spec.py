"""What a launch is: one frozen value, from which every command is made by pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fcp_cli.runs.folder import RunPaths

# What starts the ranks of one node.
Launcher = Literal["torchrun", "msrun"]

# Environment of the job; the runtime inside the script reads them.
PLAN_VARIABLE = "FCP_PLAN"
METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"
MODEL_VARIABLE = "FCP_MODEL"  # set for a script when --model was given
PROBE_VARIABLE = "FCP_PROBE"  # for a script: 1 compares numbers before the first step, 0 does not

TRAINER = ("-m", "fcp_cli.training.train")


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
        join_timeout_seconds: how long the nodes wait for each other; None: as long as the launcher does by itself.
        grace_seconds: from SIGTERM or SIGHUP to the end of everything, whether the step has ended or not.
        log_dir: where each rank's output goes; None leaves it on the terminal.
        python: the interpreter that runs torchrun and the ranks.
        launcher: what starts the ranks of each node.
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
    join_timeout_seconds: int | None = None
    grace_seconds: int = 45
    log_dir: Path | None = None
    python: str
    launcher: Launcher = "torchrun"

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
