"""Entry point of the bundled trainer: `torchrun --nproc-per-node N -m fcp_cli.training.train --help`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from fcp_cli.errors import FcpError
from fcp_cli.training.interrupt import StopRequest
from fcp_cli.training.settings import parse_settings

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Train; an FcpError becomes one line on stderr and its exit status."""
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
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        # Another rank failed, and says why; torchrun is about to end this one.
        print(f"lost the connection to another rank: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1


def _is_lost_connection(error: RuntimeError) -> bool:
    return "Connection closed by peer" in str(error) or "Connection reset by peer" in str(error)


def _fail(error: FcpError) -> int:
    print(f"error: {_who()}{error}", file=sys.stderr)
    return error.exit_status


def _who() -> str:
    """Which of several ranks speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ""
    return f"rank {os.environ['RANK']} on {socket.gethostname()}: "


def _out_of_memory(error: BaseException) -> FcpError:
    from fcp_cli.errors import RunError

    reason = str(error).strip().splitlines()[0]
    return RunError(
        f"out of device memory: plan with a smaller --tokens-per-rank, or train with --recompute ({reason})"
    )


if __name__ == "__main__":
    sys.exit(main())
