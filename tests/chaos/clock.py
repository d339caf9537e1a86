"""A wall clock that this process can set for every process that is forked from it, at any moment.

The system's clock is the machine's: it must not be set. The offset lies in memory that all forks share.
`time.monotonic` does not jump on a real machine either.
"""

from __future__ import annotations

import datetime
import mmap
import os
import struct
import sys
import time
from typing import Any

_shared = mmap.mmap(-1, 8)
_time, _utime = time.time, os.utime
_datetime = datetime.datetime


def set_clock(offset_seconds: float) -> None:
    """Let it be so many seconds later, or earlier, for every process that was forked since `install`."""
    _shared[:] = struct.pack("d", offset_seconds)


def _offset() -> float:
    found: float = struct.unpack("d", _shared[:])[0]
    return found


class _ShiftedDatetime(_datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _datetime.now(datetime.timezone.utc).replace(tzinfo=None) + datetime.timedelta(seconds=_offset())


def _touch(path: Any, times: Any = None, **named: Any) -> None:
    if times is None and "ns" not in named and _offset():  # as the system's clock has it
        times = (time.time(), time.time())
    _utime(path, times, **named)


def install() -> None:
    """Read the clock with its offset, in this process and its forks, in all modules that are imported by now."""
    time.time = lambda: _time() + _offset()
    time.time_ns = lambda: int((_time() + _offset()) * 1e9)
    os.utime = _touch
    for name, module in list(sys.modules.items()):
        if name.startswith("fcp_cli") and vars(module).get("datetime") is _datetime:
            setattr(module, "datetime", _ShiftedDatetime)  # noqa: B010
