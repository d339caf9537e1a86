"""The run directory, `runs/NAME-NNN`: every path inside it, and its small JSON files with their readers and writers."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.util.files import replaced_atomically, write_json_atomically, write_text_atomically
from fcp_cli.util.inputs import read_object, require_input
from fcp_cli.util.machine import collect_facts, facts_document, has_driver_files
from fcp_cli.util.validation import NonNegativeCount, PathText, shown, validated
from fcp_cli.util.words import first_sentence

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
    def gain(self) -> Path:
        """Predicted gain over the script's own batches, of a job whose plan has computed times."""
        return self.run_dir / "gain.txt"

    @property
    def saved(self) -> Path:
        """Folders to which a script's trainer saved its model, a line each."""
        return self.run_dir / "saved.txt"

    @property
    def stopped(self) -> Path:
        """Checkpoint of a script whose trainer was stopped; see `StoppedScript`."""
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


# The job of a run's latest launch, `launch.json`: printed by `--json`, read by --resume and --continue-from.

LAUNCH_FORMAT = "fcp-launch/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What later commands need of a serialized job.

    Attributes:
        plan, manifest: absolute paths. The manifest is the bundled trainer's: None for random tokens, a tuple for a
            mixture.
        training: non-default settings of the bundled trainer; None for a script.
        program: program as typed after `--`, or the bundled trainer's module.
    """

    plan: PathText
    plan_hash: str
    model: PathText | None
    manifest: PathText | tuple[PathText, ...] | None
    training: dict[str, Any] | None
    program: list[str]

    @property
    def manifests(self) -> tuple[Path, ...]:
        named = (self.manifest,) if isinstance(self.manifest, str) else self.manifest or ()
        return tuple(map(Path, named))


def read_launch(run_dir: Path, *, remedy: str = "") -> Launched:
    """Read the job of the latest launch; `remedy` ends messages about a damaged file."""
    path = RunPaths(run_dir=run_dir).launch
    launched = read_state(path, Launched, format_name=LAUNCH_FORMAT, remedy=remedy, is_part=True)
    if launched is None:
        fault = (
            f"{run_dir} is not a run: it has no launch.json" if run_dir.exists() else f"there is no run at {run_dir}"
        )
        raise RunError(f"{fault}; name the folder of one, such as {RUNS}/qwen3-tiny-001")
    return launched


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


def followed_plan(run_dir: Path, launched: Launched) -> Path:
    """Return the run's copy of its plan if it exists, since the original file may have changed."""
    copy = RunPaths(run_dir=run_dir).plan
    return copy if copy.is_file() else Path(launched.plan)


# Symbolic links in a run directory: a job appends and deletes where they lead, so they must be the user's.

_LINKABLE = ("checkpoints", "metrics.jsonl", "logs", "model", "origin", "tensorboard")
_LINKS = "links.json"


def require_own_link(path: Path) -> None:
    """Raise RunError if a path in a run directory links to files that the run did not write.

    A run's links are in `links.json`: those that led to an empty folder or file when a job took the directory.
    """
    if not path.is_symlink():
        return
    target = str(path.readlink())
    if _recorded_links(path.parent).get(path.name) == target or _is_empty(path):
        return
    problem = "has files that this run did not write" if path.exists() else "does not exist"
    raise RunError(
        f"{path} links to {target}, which {problem}; remove the link, or link to an empty folder, or add "
        f"{json.dumps({path.name: target})} to {path.parent / _LINKS} if the files are this run's"
    )


def require_own_links(run_dir: Path) -> None:
    """Raise RunError if any path in a run directory links to files that the run did not write."""
    for name in _LINKABLE:
        require_own_link(run_dir / name)


def note_links(run_dir: Path) -> None:
    """Record the links of a run directory, so that later starts follow them."""
    found = {name: str((run_dir / name).readlink()) for name in _LINKABLE if (run_dir / name).is_symlink()}
    if found and found != _recorded_links(run_dir):
        write_json_atomically(run_dir / _LINKS, found)


def _recorded_links(run_dir: Path) -> dict[str, Any]:
    path = run_dir / _LINKS
    return read_object(path, error=RunError) if path.exists() else {}


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.is_file() and not path.stat().st_size


# Records a run's inputs: the plan, its cost profile, and the installed versions.


def write_record(run_dir: Path, plan: Path, metadata: PlanMetadata) -> None:
    """Copy the plan, and write its cost profile and the versions on this machine."""
    paths = RunPaths(run_dir=run_dir)
    if plan != paths.plan:  # a resumed run follows its own copy
        with replaced_atomically(paths.plan) as temporary:
            shutil.copyfile(plan, temporary)
    if metadata.cost_profile:  # a job without a plan writes its own profile when training begins
        write_text_atomically(paths.profile, metadata.cost_profile)
    write_json_atomically(paths.versions, facts_document(collect_facts(asks_torch=has_driver_files())))


T = TypeVar("T")


def read_state(path: Path, kind: type[T], *, format_name: str, remedy: str = "", is_part: bool = False) -> T | None:
    """Read a state file, or return None if it is missing.

    Args:
        path: the file.
        kind: dataclass of its content without `format`.
        format_name: expected format.
        remedy: appended to messages: the command that fixes it.
        is_part: whether the file holds more than `kind` declares.
    """
    ending = remedy and f"; {remedy}"
    if not os.path.lexists(path):
        return None
    try:
        require_input(path, seekable=True)  # excludes pipes, which would block
    except OSError as error:
        raise RunError(f"cannot read {path}: {first_sentence(error)}{ending}") from error
    try:
        document = read_object(path, error=RunError)
    except RunError as error:
        raise RunError(f"{error}{ending}") from error
    found = document.pop("format", None)
    if found != format_name:
        raise RunError(f"{path} has format {shown(found)}; this fcp reads {format_name!r}")
    if is_part:
        declared = {field.name for field in fields(cast(Any, kind))}
        document = {name: value for name, value in document.items() if name in declared}
    return validated(document, kind, where=f"{path} is damaged", error=RunError, remedy=remedy)


# The checkpoint that a script's trainer wrote when its job was stopped: `stopped.json` of a run.


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppedScript:
    """A stopped training script.

    Attributes:
        checkpoint: absolute path of the trainer's checkpoint.
        step: number of optimizer steps trained.
    """

    checkpoint: str
    step: NonNegativeCount


def note_stopped(run_dir: Path, stopped: StoppedScript) -> None:
    """Record the checkpoint from which the script can resume."""
    write_text_atomically(RunPaths(run_dir=run_dir).stopped, json.dumps(asdict(stopped)))


def read_stopped(run_dir: Path) -> StoppedScript | None:
    """Return the checkpoint from which the script can resume, or None if it was not stopped."""
    path = RunPaths(run_dir=run_dir).stopped
    if not path.is_file():
        return None
    found = validated(read_object(path, error=RunError), StoppedScript, where=str(path), error=RunError)
    if not Path(found.checkpoint).exists():
        raise RunError(
            f"this run was stopped, and its checkpoint {found.checkpoint} is gone; remove {path} to train from the "
            "script's own beginning, or start a new run without --run-dir"
        )
    return found


def forget_stopped(run_dir: Path) -> None:
    """Remove the record of a stopped script, since it has now finished."""
    with suppress(FileNotFoundError):
        RunPaths(run_dir=run_dir).stopped.unlink()
