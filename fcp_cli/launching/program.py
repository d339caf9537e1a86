"""The user's program, as typed after `--`, and the launcher's program for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.console import Assumptions
from fcp_cli.errors import UsageError
from fcp_cli.launching.job.inject import is_mindspore_script, through_entry
from fcp_cli.launching.request import LaunchRequest


def started_program(request: LaunchRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the launcher's program and arguments for the user's program."""
    program = _program(request)
    arguments = request.program[len(program) :]
    return (program, arguments) if request.inject == "none" else through_entry((*program, *arguments))


def program_name(request: LaunchRequest) -> str:
    """Return the name for its run directory."""
    return Path(_program(request)[-1]).stem


def is_mindspore(request: LaunchRequest) -> bool:
    """Return whether the program is a MindSpore script, whose ranks do not need torch."""
    return bool(request.program) and is_mindspore_script(Path(request.program[0]))


def for_mindspore(request: LaunchRequest, assumed: Assumptions) -> LaunchRequest:
    """Disable injection: msrun's scheduler process also runs the script."""
    script = request.program[0]
    if request.launcher != "msrun":
        raise UsageError(f"{script} imports mindspore, whose ranks meet only under msrun; add --launcher msrun")
    if request.inject != "none":
        assumed.assume("--inject", "none", f"{script} imports mindspore, and msrun's scheduler has to run it, too")
    return replace(request, inject="none")


def _program(request: LaunchRequest) -> tuple[str, ...]:
    first, *rest = request.program
    if first == "-m":
        if not rest:
            raise UsageError("-m after -- needs the name of a module")
        return ("-m", rest[0])
    if first.startswith("-"):
        raise UsageError(f"after -- comes a script or '-m MODULE', not {first}; the trainer's options go before --")
    return (first,)
