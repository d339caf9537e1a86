"""A launch as one JSON document: what `--json` prints, and what a run directory remembers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fcp_cli.launching.inject import without_entry
from fcp_cli.launching.local import local_spec
from fcp_cli.launching.node_command import node_argv, shell_command
from fcp_cli.launching.resolve import Launch
from fcp_cli.launching.spec import MODEL_VARIABLE
from fcp_cli.launching.targets.catalog import LOCAL, JobFile
from fcp_cli.runs.launch_record import FORMAT
from fcp_cli.training.settings import TrainSettings

# Said elsewhere in the document, or true of one start only.
_NOT_REMEMBERED = ("plan", "model", "run_dir", "manifest", "resume", "quiet")


def launch_document(launch: Launch, files: Sequence[JobFile] = ()) -> dict[str, Any]:
    """Everything that decides what runs, with the command of every node, or the files that start it on a cluster."""
    spec, settings = launch.spec, launch.settings
    specs = [local_spec(launch, node) for node in range(spec.num_nodes)] if launch.target == LOCAL else []
    return {
        "format": FORMAT,
        "plan": str(spec.plan),
        "plan_hash": launch.metadata.plan_hash,
        "num_ranks": launch.metadata.num_ranks,
        "run_dir": str(spec.run_dir),
        "model": settings.model if settings is not None else spec.environment.get(MODEL_VARIABLE),
        "manifest": _text(settings.manifest) if settings is not None else None,
        "training": None if settings is None else _remembered(settings),
        "program": list(spec.program) if settings is not None else without_entry([*spec.program, *spec.arguments]),
        "target": launch.target,
        "launcher": spec.launcher,
        "num_nodes": spec.num_nodes,
        "processes_per_node": spec.processes_per_node,
        "environment": spec.job_environment(),
        "commands": [
            {"node": node, "argv": node_argv(each, node_rank=node), "shell": shell_command(each, node_rank=node)}
            for node, each in enumerate(specs)
        ],
        "files": [{"name": file.name, "text": file.text} for file in files],
    }


def _remembered(settings: TrainSettings) -> dict[str, Any]:
    """The settings that a resumed run takes over: those that are not at their defaults."""
    return {
        f.name: getattr(settings, f.name)
        for f in fields(settings)
        if f.name not in _NOT_REMEMBERED and getattr(settings, f.name) != f.default
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def resume_command(launch: Launch) -> str:
    """What to type to go on with a run."""
    words = ["fcp", "launch", "--run-dir", str(_short(launch.spec.run_dir)), "--resume"]
    return shlex.join(words)


def _short(path: Path) -> Path:
    """Relative to the working directory where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
