"""How the planner's inner loops are compiled: ahead of nothing, once, and kept on disk.

Without fast-math and without threads: every machine computes the same bits, so every machine makes the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

from fcp_cli.files import write_text_atomically

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, and keep the result on disk where some folder can be written."""
    return cast(_Function, _compiled(function))


def inlined(function: _Function) -> _Function:
    """As `kernel`, for formulas in inner loops."""
    return cast(_Function, _compiled(function, inline="always"))


def _compiled(function: Any, **options: Any) -> Any:
    try:
        return njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba found no folder to write to, as in a container with a read-only file system
        return njit(nogil=True, **options)(function)


def kept_in(compiled: Any) -> str | None:
    """The folder in which numba keeps a function compiled; None without one, or under NUMBA_DISABLE_JIT."""
    return compiled.stats.cache_path if hasattr(compiled, "stats") else None


def discard_stale_kernels(compiled: Any) -> None:
    """Remove what an older version of this package left compiled, in the folder where `compiled` is kept.

    numba compares only the file in which a function stands; the functions that it calls stand in others.
    """
    folder = kept_in(compiled)
    if folder is None:
        return
    package = Path(__file__).parent
    sources = sorted([*package.glob("*.py"), package.parent / "certificate.py"])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    stamp = Path(folder) / "fcp-kernels.sha256"
    with suppress(OSError):
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        for file in stamp.parent.glob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(stamp, digest)
