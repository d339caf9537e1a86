"""The record of a run's latest launch, `launch.json`: what `--resume` and `--continue-from` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.runs.folder import RUNS, RunPaths

FORMAT = "fcp-launch/1"


def write_launch(run_dir: Path, document: Mapping[str, Any]) -> None:
    """Write how a run was launched, so that --resume finds it again."""
    write_text_atomically(RunPaths(run_dir=run_dir).launch, launch_text(document))


def launch_text(document: Mapping[str, Any]) -> str:
    """Return the record as it stands in its file."""
    return json.dumps(document, indent=2) + "\n"


def read_launch(run_dir: Path) -> dict[str, Any]:
    """Read how a run was launched last.

    Raises:
        RunError: there is no run in `run_dir`.
    """
    path = RunPaths(run_dir=run_dir).launch
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{run_dir} is not a run that can be resumed: it has no readable {path.name}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(f"{path} is not a launch record of format {FORMAT!r}")
    return document


def latest_run_dir(name: str | None, *, runs: Path = RUNS) -> Path:
    """Return the run of the bundled trainer to resume when none is named: the one launched last, of this name if given.

    Raises:
        RunError: there is none.
    """
    candidates = [path for path in runs.glob(f"{name or '*'}-[0-9]*") if RunPaths(run_dir=path).launch.is_file()]
    found = [path for path in candidates if read_launch(path)["training"] is not None]
    if not found:
        what = f"run of {name}" if name else "run"
        raise RunError(f"there is no {what} in the folder {runs} to resume; name one with --run-dir")
    return max(found, key=lambda path: RunPaths(run_dir=path).launch.stat().st_mtime_ns)


def has_followed(run_dir: Path, plan_hash: str) -> bool:
    """Return whether the latest launch in `run_dir` followed the plan of this hash."""
    try:
        return bool(read_launch(run_dir)["plan_hash"] == plan_hash)
    except RunError:
        return False


def followed_plan(run_dir: Path, launched: Mapping[str, Any]) -> Path:
    """Return the plan that a run follows: its own copy, because the file it was launched with may be another by now."""
    copy = RunPaths(run_dir=run_dir).plan
    return copy if copy.is_file() else Path(launched["plan"])
