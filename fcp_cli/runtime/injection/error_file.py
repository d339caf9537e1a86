"""Leave the error of a failed rank where torchrun looks for it, as TorchElastic's `@record` would, without torch."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path

from fcp_cli.errors import FcpError

_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torchrun sets it for every rank


def record_error(error: BaseException) -> None:
    """Write why this rank ends into the rank's error file, if its launcher named one.

    torchrun takes the earliest file of a job for the root cause. A file that is already there stays: the script's own
    `@record` was nearer to the error.
    """
    path = os.environ.get(_VARIABLE)
    if not path or Path(path).exists():
        return
    is_ours = isinstance(error, FcpError)  # its line is written for the user, and no traceback adds to it
    line = str(error) if is_ours else f"{type(error).__name__}: {error}"
    stack = line if is_ours else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the error itself is on stderr, and must not be hidden by another
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
