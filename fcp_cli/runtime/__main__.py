"""`python -m fcp_cli.runtime -- SCRIPT ARGS`: run a training script under the plan in FCP_PLAN."""

from __future__ import annotations

import atexit
import gc
import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fcp_cli.errors import FcpError, UsageError
from fcp_cli.runtime.inject import install
from fcp_cli.runtime.launcher import end_with_launcher, is_scheduler, record_error
from fcp_cli.runtime.planner_process import start_early


def main() -> None:
    """Run the program named on the command line; exit with its status or exception."""
    if is_scheduler(os.environ):
        return
    end_with_launcher()
    atexit.register(_end_rank)  # exit handlers run in reverse order: this one last
    try:
        is_module, program = _parsed(sys.argv[1:])
        install(os.environ)
        start_early(os.environ)
        _run(program, is_module=is_module)
    except FcpError as error:
        record_error(error)
        print(f"error: {error}", file=sys.stderr)
        _failed.append(error.exit_status)
        sys.exit(error.exit_status)
    except SystemExit as error:
        _failed.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except KeyboardInterrupt:  # Python ends itself with the signal
        atexit.unregister(_end_rank)
        raise
    except BaseException:
        _failed.append(1)
        raise


def _parsed(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether the program is a module, and its name and arguments. torchrun swallows the `--` before them."""
    rest = list(words[1:] if words and words[0] == "--" else words)
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or (rest[0].startswith("-") and not Path(rest[0]).exists()):
        raise UsageError("usage: python -m fcp_cli.runtime -- SCRIPT ARGS   (or -- -m MODULE ARGS)")
    return is_module, rest


def _run(program: list[str], *, is_module: bool) -> None:
    """Run a program as `__main__`, with `sys.argv` and `sys.path[0]` as set by Python."""
    sys.argv, name = program, program[0]
    keeps_path = getattr(sys.flags, "safe_path", False)  # python -P, since 3.11
    if is_module:
        if not keeps_path:
            sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not Path(name).exists():
        raise UsageError(f"there is no script {name}")
    if not keeps_path:
        sys.path[0] = os.path.dirname(os.path.realpath(name))  # noqa: PTH120  as Python does: '' never
    runpy.run_path(name, run_name="__main__")


_failed: list[int] = []  # exit status of a program that ended with an exception


def _end_rank() -> None:
    """Exit immediately if the rank has failed or used torch, after all exit handlers have run.

    Threads that leave torch or a back end while Python finalizes abort the process: its status and last line would not
    be those of the error, and a finished rank would count as failed. Destroying the process group does not end gloo's
    threads if a DDP model still refers to it.
    """
    if not any(_failed) and "torch" not in sys.modules:
        return
    gc.collect()  # finalizers of the script's own objects
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            with suppress(Exception):  # closed, or a pipe whose reader is gone
                found.flush()
    os._exit(_failed[0] if _failed else 0)


if __name__ == "__main__":
    main()
