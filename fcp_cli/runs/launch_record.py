"""The record of a run's latest launch, `launch.json`: printed by `--json`, read by --resume and --continue-from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.runs.folder import RUNS, RunPaths
from fcp_cli.runs.state_file import read_state
from fcp_cli.validation import Count, PathText

FORMAT = "fcp-launch/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """Command of a node: as words, and quoted for a shell including the environment."""

    node: int
    argv: list[str]
    shell: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A generated file of a cluster job."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """All settings of a launched job.

    Attributes:
        plan, run_dir, manifest: absolute paths. The manifest is the bundled trainer's: None for random tokens, a tuple
            for a mixture.
        training: non-default settings of the bundled trainer; None for a script.
        program: program as typed after `--`, or the bundled trainer's module.
        environment: environment variables that fcp sets.
        commands: commands of all nodes of a local job.
        files: files that start the job on a cluster.
    """

    format: str = FORMAT
    plan: PathText
    plan_hash: str
    num_ranks: Count
    run_dir: PathText
    model: PathText | None
    manifest: PathText | tuple[PathText, ...] | None
    training: dict[str, Any] | None
    program: list[str]
    target: str = "local"
    launcher: str = "torchrun"
    num_nodes: Count = 1
    processes_per_node: Count = 1
    environment: dict[str, str] = field(default_factory=dict)
    commands: list[NodeCommand] = field(default_factory=list)
    files: list[JobFile] = field(default_factory=list)

    @property
    def manifests(self) -> tuple[Path, ...]:
        named = (self.manifest,) if isinstance(self.manifest, str) else self.manifest or ()
        return tuple(map(Path, named))

    def text(self) -> str:
        """Return the content of `launch.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"


def write_launch(run_dir: Path, record: LaunchRecord) -> None:
    """Write the launch record, for --resume."""
    write_text_atomically(RunPaths(run_dir=run_dir).launch, record.text())


def read_launch(run_dir: Path, *, remedy: str = "") -> LaunchRecord:
    """Read the latest launch record; `remedy` ends messages about a damaged record."""
    record = read_state(RunPaths(run_dir=run_dir).launch, LaunchRecord, format_name=FORMAT, remedy=remedy)
    if record is None:
        fault = (
            f"{run_dir} is not a run: it has no launch.json" if run_dir.exists() else f"there is no run at {run_dir}"
        )
        raise RunError(f"{fault}; name the folder of one, such as {RUNS}/qwen3-tiny-001")
    return record


def latest_run_dir(name: str | None, *, runs: Path = RUNS) -> Path:
    """Return the bundled trainer's newest run, or its newest run with this name: the default for --resume."""
    candidates = [path for path in runs.glob(f"{name or '*'}-[0-9]*") if RunPaths(run_dir=path).launch.is_file()]
    for path in sorted(candidates, key=lambda path: RunPaths(run_dir=path).launch.stat().st_mtime_ns, reverse=True):
        if read_launch(path, remedy="name the run to resume with --run-dir").training is not None:
            return path
    wanted = f"run of {name}" if name else "run"
    raise RunError(f"there is no {wanted} in the folder {runs} to resume; name one with --run-dir")


def has_followed(run_dir: Path, plan_hash: str) -> bool:
    """Return whether the latest launch in `run_dir` followed the plan with this hash."""
    try:
        return read_launch(run_dir).plan_hash == plan_hash
    except RunError:
        return False


def followed_plan(run_dir: Path, launched: LaunchRecord) -> Path:
    """Return the run's copy of its plan if it exists, since the original file may have changed."""
    copy = RunPaths(run_dir=run_dir).plan
    return copy if copy.is_file() else Path(launched.plan)
