"""The `fcp` command: one thin file per verb in `fcp_cli/commands/`.

Nothing heavy is imported here: `fcp --help` answers in under 0.3 s. Precedence of every setting is
flag > FCP_<COMMAND>_<FLAG> environment variable > YAML config (`fcp.yaml` or --config) > default,
which is what click's auto_envvar_prefix and default_map give.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fcp_cli import __version__
from fcp_cli.config import read_config
from fcp_cli.console import human, verbosity
from fcp_cli.errors import FcpError, Interrupted


class RootGroup(TyperGroup):
    """Gives Ctrl-C its own exit status (click alone would make it 1), and keeps help short."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_environment(command)
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was left half-written") from None
        except typer.BadParameter as error:
            error.message += _origin(error)
            raise


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


app = typer.Typer(
    name="fcp",
    cls=RootGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan and launch Flexible Context Parallelism: ring-attention groups of any degree, decided before training.",
    epilog="Every option can also be set by FCP_<COMMAND>_<OPTION> in the environment, or in fcp.yaml. "
    "Exit status: 0 done, 1 the input or the plan is at fault, 2 wrong usage.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fcp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(envvar="FCP_CONFIG", help="YAML with options per command; ./fcp.yaml is read when it exists."),
    ] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Do not read ./fcp.yaml.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    verbosity.level = -1 if quiet else verbose
    # Set here and not on the app: an FCP_VERSION that somebody exported must not act as our --version.
    context.auto_envvar_prefix = "FCP"
    if config is None and not no_config and Path("fcp.yaml").is_file():
        config = Path("fcp.yaml")
    if config is not None:
        context.default_map = read_config(config, context.command)
        context.obj = config


def main() -> None:
    """Run `fcp`; an FcpError becomes one line on stderr and its exit status."""
    import fcp_cli.commands  # noqa: F401  registers the verbs

    try:
        app()
    except FcpError as error:
        human_error(str(error))
        sys.exit(error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe is gone: nobody is left to tell
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        human_error("cannot write to standard output: no space left on device")
        # What is left in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def human_error(message: str) -> None:
    """Print one line on stderr, even under -q."""
    console = human()
    console.quiet = False
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, soft_wrap=True)
