"""Entry point of the bundled trainer: `torchrun --nproc-per-node N -m fcp_cli.training.train --help`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from fcp_cli.errors import FcpError, RunError
from fcp_cli.runtime.error_file import record_error
from fcp_cli.training.interrupt import StopRequest
from fcp_cli.training.settings import parse_settings

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and turn an FcpError into one line on stderr and its exit status."""
    stop = StopRequest().install()  # before the slow imports: Ctrl-C at any time is a request, not a traceback
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv)
        import torch

        from fcp_cli.training.trainer import train
    except FcpError as error:
        return _fail(error)
    try:
        return 0 if train(settings, stop) else _INTERRUPTED
    except FcpError as error:
        return _fail(error)
    except torch.OutOfMemoryError as error:
        return _fail(_out_of_memory(error))
    except Exception as error:
        if isinstance(error, RuntimeError) and _is_lost_connection(error):
            # Another rank failed, and leaves its own error; torchrun is about to end this one.
            print(f"lost the connection to another rank: {str(error).splitlines()[0]}", file=sys.stderr)
            return 1
        record_error(error)
        raise


def _is_lost_connection(error: RuntimeError) -> bool:
    return "Connection closed by peer" in str(error) or "Connection reset by peer" in str(error)


def _fail(error: FcpError) -> int:
    record_error(error)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    speaker = "" if is_alone else f"rank {os.environ['RANK']} on {socket.gethostname()}: "
    print(f"error: {speaker}{error}", file=sys.stderr)
    return error.exit_status


def _out_of_memory(error: BaseException) -> FcpError:
    reason = str(error).strip().splitlines()[0]
    return RunError(
        f"out of device memory: plan with a smaller --tokens-per-rank, or train with --recompute ({reason})"
    )


if __name__ == "__main__":
    sys.exit(main())
