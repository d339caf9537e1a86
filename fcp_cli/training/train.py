"""Entry point of the bundled trainer: `torchrun --nproc-per-node N -m fcp_cli.training.train --help`."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence

from fcp_cli.errors import FcpError, RunError
from fcp_cli.runtime.launcher import end_with_launcher, record_error
from fcp_cli.runtime.stop_request import INTERRUPTED, StopRequest
from fcp_cli.training.settings import parse_settings

# gloo's messages; it has no exception classes for these.
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer")
_GLOO_DECORATION = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*")  # its source line, its advice
_WAITED = re.compile(r"Timed out waiting (\d+)ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; print an FcpError as one line on stderr and return its exit status."""
    end_with_launcher()
    stop = StopRequest().install()  # before the slow imports, so that Ctrl-C never causes a traceback
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv)
        import torch

        from fcp_cli.training.trainer import train
    except FcpError as error:
        return _fail(error)
    try:
        return 0 if train(settings, stop) else INTERRUPTED
    except FcpError as error:
        return _fail(error)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().splitlines()[0]
        remedy = "plan with a smaller --tokens-per-rank, or train with --recompute full"
        return _fail(RunError(f"out of device memory: {remedy} ({reason})"))
    except Exception as error:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION):
            # Another rank failed, and leaves its own error; torchrun is about to end this one.
            reason = _GLOO_DECORATION.sub("", str(error).splitlines()[0])
            print(f"lost the connection to another rank: {reason}", file=sys.stderr)
            return 1
        if isinstance(error, RuntimeError) and (waited := _WAITED.search(str(error))):
            why = "it is stopped or slow, or the network between them is down; --rank-timeout is the time to wait"
            return _fail(RunError(f"waited {int(waited[1]) / 1000.0:g} s in vain for another rank: {why}"))
        record_error(error)
        raise


def _fail(error: FcpError) -> int:
    record_error(error)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    speaker = "" if is_alone else f"rank {os.environ['RANK']} on {socket.gethostname()}: "
    print(f"error: {speaker}{error}", file=sys.stderr)
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
