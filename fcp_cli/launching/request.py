"""What was typed for `fcp launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.launching.job.inject import Inject
from fcp_cli.launching.job.job import LOCAL, Launcher
from fcp_cli.launching.targets.options import ClusterRequest, choose_target
from fcp_cli.runs.folder import RunPaths, next_run_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What was typed; None is what was not.

    Attributes:
        program: the script and its arguments after `--`, or `-m module` and its arguments; empty: the bundled trainer.
        training: settings of the bundled trainer that were given, by field of `TrainSettings`.
        synthetic: train on random tokens.
        device: `cpu`, `cuda`, `npu`, or `auto`.
        launcher: what starts the ranks of a node.
        cluster: where the job runs, if not here.
        dry_run: nothing is started or written.
        grace_seconds: from SIGTERM to the end of everything.
        inject: how the program is made to follow the plan.
        probe: whether the program's numbers are compared before its first step; None: in the first run of a plan.
    """

    plan: Path | None = None
    manifest: Path | None = None
    model: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29500
    join_timeout_seconds: int = 300
    run_dir: Path | None = None
    resume: bool = False
    synthetic: bool = False
    program: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    launcher: Launcher = "torchrun"
    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    dry_run: bool = False
    grace_seconds: int = 45
    inject: Inject = "entry"
    probe: bool | None = None

    @property
    def runs_here(self) -> bool:
        """Whether this machine will run ranks, and so must have what they need."""
        return not self.dry_run and choose_target(self.cluster) == LOCAL


def run_dir_of(request: LaunchRequest, name: str) -> Path:
    """The run directory that was named, else a new one of this name.

    Raises:
        RunError: it holds a run, which the bundled trainer would overwrite.
    """
    run_dir = request.run_dir or next_run_dir(name)
    paths = RunPaths(run_dir=run_dir)
    may_exist = request.program or request.resume or request.node_rank  # node 0 may have begun before this one looks
    if not may_exist and (paths.metrics.exists() or paths.checkpoints.exists()):
        raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another --run-dir")
    return run_dir
