"""The `fcp` command, assembled from one file per verb.

No command imports anything heavy at module level: `fcp --help` takes less than 0.3 s. Precedence of settings: flag >
environment variable FCP_<COMMAND>_<FLAG> > YAML config (`fcp.yaml` or --config) > default, implemented by click's
auto_envvar_prefix and default_map.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fcp_cli import __version__
from fcp_cli.cli.check import check
from fcp_cli.cli.command import App, RootGroup
from fcp_cli.cli.compare import compare
from fcp_cli.cli.config import ConfigFile, read_config, unknown_variables
from fcp_cli.cli.demo import demo
from fcp_cli.cli.env import env
from fcp_cli.cli.inspect import inspect
from fcp_cli.cli.launch import launch
from fcp_cli.cli.list import list_names
from fcp_cli.cli.manifest import manifest_app
from fcp_cli.cli.plan import plan
from fcp_cli.cli.profile import profile_app
from fcp_cli.cli.report import report
from fcp_cli.cli.selftest import selftest
from fcp_cli.cli.verify import verify
from fcp_cli.cli.watch import watch
from fcp_cli.errors import FcpError, UsageError, refuse_missing_thread
from fcp_cli.util.console import note, open_closed_streams, print_error, settle_terminal_size, verbosity
from fcp_cli.util.plugins import pip_install_module
from fcp_cli.util.words import first_line

app = App(
    name="fcp",
    cls=RootGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Plan and launch Flexible Context Parallelism: ring-attention groups of any degree, decided before training.

    Results go to standard output, as tables or with --json as one document; progress and warnings to standard error.
    Every option can also be set by FCP_<COMMAND>_<OPTION> in the environment, or in fcp.yaml. Exit status: 0 done,
    1 invalid input or plan, 2 wrong usage, 128 + N ended by signal N: 130 for Ctrl-C, 143 for SIGTERM,
    129 for SIGHUP.
    """,
    epilog="fcp profile\nfcp plan dataset.parquet\nfcp launch --model qwen3-tiny",
)
# In the order in which a new user needs them; RootGroup puts groups first.
app.add_typer(manifest_app, name="manifest")
app.add_typer(profile_app, name="profile")
for _verb in (demo, plan, launch, check, inspect, compare, verify, watch, report, env, selftest):
    app.command()(_verb)
app.command("list")(list_names)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fcp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="FCP_CONFIG",
            help="YAML with options per command.",
            show_default="fcp.yaml, if it exists",
        ),
    ] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Do not read ./fcp.yaml.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Print more.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    verbosity.level = -1 if quiet else verbose
    # Set here, not on the app: an exported FCP_VERSION must not act as --version.
    context.auto_envvar_prefix = "FCP"
    for line in unknown_variables(os.environ, context.command):
        note(f"warning: {line}")
    if config is not None or (not no_config and Path("fcp.yaml").is_file()):
        context.obj = ConfigFile(path=config or Path("fcp.yaml"), is_named=config is not None)
        context.default_map = read_config(context.obj.path, context.command)


_SURROGATE = re.compile("[\ud800-\udfff]")  # a byte of an argument that is not UTF-8


def main() -> None:
    """Run `fcp`; an FcpError becomes one line on stderr and its exit status."""
    open_closed_streams()
    settle_terminal_size(os.environ)
    stdout = sys.stdout
    try:
        # Plans and run folders record names as text.
        if word := next((word for word in sys.argv if not word.isascii() and _SURROGATE.search(word)), None):
            raise UsageError(f"the argument {word!a} is not UTF-8 text; rename the file or folder")
        try:
            app()
        except RuntimeError as error:
            refuse_missing_thread(error)
            raise
    except SystemExit:
        if sys.stdout is not stdout:  # click replaces it if the reader of the pipe is gone, and ends with status 1
            sys.exit(141)
        raise
    except FcpError as error:
        print_error(str(error))
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        install = pip_install_module((error.name or "").partition(".")[0])
        if install is None:
            raise
        print_error(f"{error.name} is not installed here, and this command needs it; run: {install}")
        sys.exit(1)
    except MemoryError as error:
        print_error(f"not enough memory: {first_line(error)}; the input states or holds too much for this machine")
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            if error.filename is None:
                raise
            # For example, a name that is too long or an unreadable folder.
            print_error(f"cannot use {os.fsdecode(error.filename)}: {error.strerror}")
            sys.exit(1)
        print_error("cannot write to standard output: no space left on device")
        # Flushing the rest of the buffer at exit would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
