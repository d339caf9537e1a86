"""`python -m fcp_cli.runtime -- SCRIPT ARGS`: run a training script under the plan in FCP_PLAN."""

from __future__ import annotations

import atexit
import os
import sys

from fcp_cli.errors import FcpError
from fcp_cli.runtime.communication.launcher_watch import end_with_launcher
from fcp_cli.runtime.injection.error_file import record_error
from fcp_cli.runtime.injection.install import install
from fcp_cli.runtime.injection.program import parse_program, run_program
from fcp_cli.runtime.injection.ranks import is_scheduler
from fcp_cli.runtime.online.early import start_early


def main() -> None:
    """Run the program that the command line names, and end with its exit status or its exception."""
    if is_scheduler(os.environ):
        return
    end_with_launcher()
    atexit.register(_end_failed_rank)  # the first to be registered is the last to run
    try:
        program = parse_program(sys.argv[1:])
        install(os.environ)
        start_early(os.environ)
        run_program(program)
    except FcpError as error:
        record_error(error)
        print(f"error: {error}", file=sys.stderr)
        _failed.append(error.exit_status)
        sys.exit(error.exit_status)
    except SystemExit as error:
        _failed.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except KeyboardInterrupt:  # Python ends itself by the signal
        raise
    except BaseException:
        _failed.append(1)
        raise


_failed: list[int] = []  # the exit status of a program that ended with an exception


def _end_failed_rank() -> None:
    """End a rank that has failed at once, after it has written its error and all exit handlers have run.

    Threads of a back end that still need Python while the interpreter ends abort the process: then neither its status
    nor its last line would be those of the error.
    """
    if any(_failed):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failed[0])


if __name__ == "__main__":
    main()
