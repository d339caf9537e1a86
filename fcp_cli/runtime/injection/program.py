"""Run a script or a module as `python SCRIPT ARGS` would, in a process that is already prepared."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A script, or a module, and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def parse_program(words: Sequence[str]) -> Program:
    """Parse the words after `python -m fcp_cli.runtime`. A `--` before them is optional: torchrun swallows one."""
    rest = list(words[1:] if words and words[0] == "--" else words)
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or (rest[0].startswith("-") and not Path(rest[0]).exists()):
        raise UsageError("usage: python -m fcp_cli.runtime -- SCRIPT ARGS   (or -- -m MODULE ARGS)")
    return Program(name=rest[0], is_module=is_module, arguments=tuple(rest[1:]))


def run_program(program: Program) -> None:
    """Run a program as `__main__`, with `sys.argv` and `sys.path[0]` as Python sets them."""
    sys.argv = [program.name, *program.arguments]
    keeps_path = getattr(sys.flags, "safe_path", False)  # python -P, from 3.11 on
    if program.is_module:
        if not keeps_path:
            sys.path[0] = str(Path.cwd())
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        return
    if not Path(program.name).exists():
        raise UsageError(f"there is no script {program.name}")
    if not keeps_path:
        sys.path[0] = os.path.dirname(os.path.realpath(program.name))  # noqa: PTH120  as Python does: '' never
    runpy.run_path(program.name, run_name="__main__")
