"""Injects fcp's hooks into a user's script: through the runtime's entry point, or through the environment."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import fcp_cli.runtime.injection
from fcp_cli.errors import RunError
from fcp_cli.launching.job.job import (
    METRICS_VARIABLE,
    PLAN_VARIABLE,
    PROBE_VARIABLE,
    RUN_DIR_VARIABLE,
    Variable,
)
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.launch_record import has_followed

ENTRY = ("-m", "fcp_cli.runtime")
"""Entry point that prepares the rank and runs the program after `--`."""

# Folder with a sitecustomize.py, which Python runs at start-up if the folder is on PYTHONPATH.
_SITE = Path(fcp_cli.runtime.injection.__file__).parent / "site"


def through_entry(program: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (program, arguments) for the launcher to run `program` with hooks."""
    return ENTRY, ("--", *program)


def without_entry(words: Sequence[str]) -> list[str]:
    """Undo `through_entry`: return the user's program and arguments as one list."""
    start = len(ENTRY) + 1
    return list(words[start:] if tuple(words[:start]) == (*ENTRY, "--") else words)


def is_mindspore_script(script: Path) -> bool:
    """Return whether a script imports MindSpore but not torch; False if it cannot be parsed."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    imported = {name.partition(".")[0] for node in ast.walk(tree) for name in _imported_by(node)}
    return "mindspore" in imported and "torch" not in imported


def _imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def probe_variable(wanted: bool | None, *, run_dir: Path, plan_hash: str, given: Mapping[str, str]) -> Variable:
    """Return the variable that enables the probe, a numeric comparison before the first step.

    Args:
        wanted: True for --probe, False for --no-probe, None: in a plan's first run.
        run_dir: run directory, whose record tells whether it has followed this plan before.
        plan_hash: hash of the plan.
        given: the user's environment.
    """
    value, source, is_given = given.get(PROBE_VARIABLE), "your environment", True
    if wanted is not None:
        value, source, is_given = str(int(wanted)), "--probe" if wanted else "--no-probe", False
    elif value is None:
        is_first = not has_followed(run_dir, plan_hash)
        source = (
            "the first run of this plan in the run directory"
            if is_first
            else "the run directory has run this plan before"
        )
        value, is_given = str(int(is_first)), False
    reason = "a tiny step on the plan's groups against one alone; wrong numbers stop the job"
    return Variable(name=PROBE_VARIABLE, value=value, reason=reason, source=source, is_given=is_given)


def hooked_environment(*, plan: Path, run_dir: Path, probe: Variable) -> dict[str, str]:
    """Return the environment that injects hooks into a command that starts its own ranks (--inject env)."""
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        PLAN_VARIABLE: str(plan.absolute()),
        METRICS_VARIABLE: str(RunPaths(run_dir=run_dir.absolute()).metrics),
        RUN_DIR_VARIABLE: str(run_dir.absolute()),
        probe.name: probe.value,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def become(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Replace this process with the command (exec), so that output, signals and exit status are its own."""
    try:
        os.execvpe(argv[0], argv, {**os.environ, **environment})
    except OSError as error:
        raise RunError(
            f"cannot start {argv[0]}: {error.strerror}; --inject env runs a command that starts the ranks "
            "itself, like 'bash train.sh' or 'torchrun ...'; remove it for a Python script"
        ) from error
