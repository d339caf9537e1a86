"""Write the error of a failed rank to torchrun's error file, like TorchElastic's `@record`, but without torch."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path

from fcp_cli.errors import FcpError

_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for every rank


def record_error(error: BaseException) -> None:
    """Write this rank's error to its error file, if the launcher named one.

    torchrun reports the earliest error file of a job as the root cause. An existing file is kept: the script's own
    `@record` was closer to the error.
    """
    path = os.environ.get(_VARIABLE)
    if not path or Path(path).exists():
        return
    is_ours = isinstance(error, FcpError)  # its message is written for the user and needs no traceback
    line = str(error) if is_ours else f"{type(error).__name__}: {error}"
    stack = line if is_ours else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the error itself is on stderr, and must not be masked by another
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
