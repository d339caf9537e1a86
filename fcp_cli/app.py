"""The `fcp` command: one thin file per verb in `fcp_cli/commands/`.

Nothing heavy is imported here: `fcp --help` answers in under 0.3 s. Precedence of every setting is
flag > FCP_<COMMAND>_<FLAG> environment variable > YAML config (`fcp.yaml` or --config) > default,
which is what click's auto_envvar_prefix and default_map give.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fcp_cli import __version__
from fcp_cli.console import human, verbosity
from fcp_cli.errors import FcpError, UsageError

app = typer.Typer(
    name="fcp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "FCP", "help_option_names": ["-h", "--help"]},
    help="Plan and launch Flexible Context Parallelism: ring-attention groups of any degree, decided before training.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fcp {__version__}")
        raise typer.Exit


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise UsageError(f"{path} must map commands to their options, for example 'plan: {{ranks: 64}}'")
    return config


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="YAML with options per command; ./fcp.yaml is read when it exists.")
    ] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Do not read ./fcp.yaml.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    verbosity.level = -1 if quiet else verbose
    if config is None and not no_config and Path("fcp.yaml").is_file():
        config = Path("fcp.yaml")
    if config is not None:
        context.default_map = {
            command: {name.replace("-", "_"): value for name, value in (options or {}).items()}
            for command, options in _read_config(config).items()
        }


def main() -> None:
    """Run `fcp`; an FcpError becomes one line on stderr and its exit status."""
    import fcp_cli.commands  # noqa: F401  registers the verbs

    try:
        app()
    except FcpError as error:
        human_error(str(error))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        human_error("interrupted; nothing was left half-written")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe is gone: nobody is left to tell
        sys.exit(141)


def human_error(message: str) -> None:
    """Print one line on stderr, even under -q."""
    console = human()
    console.quiet = False
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, soft_wrap=True)
