"""Compiles the planner's inner loops: on their first call, and kept on disk for later runs.

Without fast-math and without threads: every machine computes the same bits, so every machine makes the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, and keep the result on disk where some folder can be written."""
    return cast(_Function, _compiled(function))


def inlined(function: _Function) -> _Function:
    """Compile a formula into the inner loops that use it; otherwise as `kernel`."""
    return cast(_Function, _compiled(function, inline="always"))


def is_kept(compiled: Any) -> bool:
    """Return whether an earlier run left this function compiled, from the same sources, on disk."""
    kept = getattr(compiled, "_cache", None)  # a plain function has none: under NUMBA_DISABLE_JIT nothing is compiled
    return isinstance(kept, _PackageCache) and kept.has_entries()


@cache
def package_stamp(folder: Path = Path(__file__).parent) -> str:
    """Return the hash of all sources of a package: this one's is the key under which its kernels are kept."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(folder.glob("*.py")))).hexdigest()


class _PackageCache(FunctionCache):
    """numba's cache on disk, whose entries count only for one state of this whole package.

    numba compares the file in which a function stands; but what that function calls is compiled into it and stands in
    other files, so that a change there would go unseen. numba has no setting for this: the stamp that its index of a
    function carries is exchanged here. Entries under another stamp are passed over, and overwritten by the next ones
    of their name, as numba does after a change of the file itself; nothing is deleted.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call]
            self.cache_path, self._impl.filename_base, package_stamp()
        )

    def has_entries(self) -> bool:
        return bool(self._cache_file._load_index())  # type: ignore[no-untyped-call]


def _compiled(function: Any, **options: Any) -> Any:
    compiled = njit(nogil=True, **options)(function)
    if hasattr(compiled, "enable_caching"):
        # A RuntimeError: numba found no folder to write to, as in a container with a read-only file system.
        with suppress(RuntimeError):
            compiled._cache = _PackageCache(function)  # as `enable_caching` does with numba's own
    return compiled
