"""How the commands of `fcp` read a command line: typer's classes, where people expect more of them than typer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from fcp_cli.console import verbosity
from fcp_cli.errors import Interrupted, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A verb: -q and -v may stand behind it, too, and its usage shows arguments as everybody writes them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _without_verbosity(args, self.params))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_usage_piece(piece) for piece in super().collect_usage_pieces(ctx)]


def _without_verbosity(args: list[str], parameters: Sequence[Any]) -> list[str]:
    """Obey -q and -v among a verb's words, and leave them out; option values and what follows -- are not looked at."""
    taking_value = {name for p in parameters if not getattr(p, "is_flag", True) for name in p.opts}
    left: list[str] = []
    for index, word in enumerate(args):
        if word == "--":
            return [*left, *args[index:]]
        level = None if left and left[-1] in taking_value else _LEVELS.get(word)
        if level is None:
            left.append(word)
        else:
            verbosity.level = level
    return left


_LEVELS = {"-q": -1, "--quiet": -1, "-v": 1, "--verbose": 1, "-vv": 2}


def _usage_piece(piece: str) -> str:
    """Typer writes {NAME} where NAME is required, and brackets around a metavar that has its own."""
    if piece.startswith("{") and piece.endswith("}"):
        return piece[1:-1].upper()
    return piece[1:-1] if piece.startswith("[[") and piece.endswith("]]") else piece


class App(typer.Typer):
    """Verbs are commands of our own class."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, **{"cls": Command, **settings})


class RootGroup(TyperGroup):
    """Gives Ctrl-C its own exit status (click alone would make it 1), and keeps help short."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_environment(command)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _WRONG_USAGE as error:
            raise _one_line(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was left half-written") from None
        except _WRONG_USAGE as error:
            raise _one_line(error) from None


_WRONG_USAGE: Any = typer.BadParameter.__base__  # click's UsageError, wherever typer takes click from


def _one_line(error: Any) -> Exception:
    """What click says in a box below the usage, as every other error of fcp; help that was asked for stays help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast("Exception", error)
    message = error.format_message().rstrip(".").replace("Value error, ", "").replace("Input should", "it should")
    message = message[:1].lower() + message[1:]
    if isinstance(error, typer.BadParameter):
        message += _origin(error)
    return UsageError(f"{message}; see '{error.ctx.command_path} --help'" if error.ctx else message)


def _origin(error: typer.BadParameter) -> str:
    """Where a wrong value comes from if it was not typed: nobody looks for a flag in a command that has none."""
    if error.ctx is None or error.param is None or not error.param.name:
        return ""
    source = error.ctx.get_parameter_source(error.param.name)
    if source is not None and source.name == "DEFAULT_MAP":
        return f" (set in {error.ctx.find_root().obj})"
    if source is not None and source.name == "ENVIRONMENT":
        return f" (set by {error.ctx.auto_envvar_prefix}_{error.param.name.upper()})"
    return ""


def _hide_environment(command: Any) -> None:
    """The epilog names the variables once by their rule; a line per option would double the length of every help."""
    for parameter in command.params:
        parameter.show_envvar = False
    for subcommand in getattr(command, "commands", {}).values():
        _hide_environment(subcommand)
