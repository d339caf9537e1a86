"""The user's program after `--`, and the program that the launcher runs for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.console import Assumptions
from fcp_cli.errors import UsageError
from fcp_cli.launching.job.inject import is_mindspore_script, through_entry
from fcp_cli.launching.request import LaunchRequest


def started_program(request: LaunchRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (program, arguments) for the launcher: the user's program, through the hooks' entry point if injected."""
    program = _program(request)
    arguments = request.program[len(program) :]
    return (program, arguments) if request.inject == "none" else through_entry((*program, *arguments))


def program_name(request: LaunchRequest) -> str:
    """Return the program's name, after which its run directory is named."""
    return Path(_program(request)[-1]).stem


def is_mindspore(request: LaunchRequest) -> bool:
    """Return whether the program is a MindSpore script, whose ranks do not need torch."""
    return bool(request.program) and is_mindspore_script(Path(request.program[0]))


def for_mindspore(request: LaunchRequest, assumed: Assumptions) -> LaunchRequest:
    """Disable injection, since msrun's scheduler process also runs the script; raise UsageError under torchrun."""
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
