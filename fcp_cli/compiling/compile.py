"""Decorators that compile inner loops on their first call and cache them on disk.

No fast-math and no threads, so that results are bitwise equal and every machine makes the same plan. The target is a
generic processor of the architecture, so that kernels in a wheel (`make wheel`) or a shared home folder work on all
machines, without loss of speed. This applies to everything that numba compiles in this process;
`NUMBA_CPU_NAME=host` targets the local processor instead.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.event import TimingListener, install_listener, trigger_event
from numba.core.registry import cpu_target

from fcp_cli.compiling.parts import Kernel

_Function = TypeVar("_Function", bound=Callable[..., Any])
SHIPPED: Final = Path(__file__).parents[1] / "_data" / "compiled"
"""Kernels that came with the wheel, for the Python, numba and architecture that it was made on; used where all fit."""

_COMPILE: Final = "numba:compile"
_FORMULA: Final = Path(__file__).parents[1] / "cost" / "formula.py"  # compiled into kernels of other folders

_CONFIG: Final[Any] = config
if _CONFIG.CPU_NAME is None:  # unless set by NUMBA_CPU_NAME
    _CONFIG.CPU_NAME, _CONFIG.CPU_FEATURES = "generic", ""


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call and cache the result on disk if a folder is writable."""
    return cast(_Function, _compiled(function))


def leaf(function: _Function) -> _Function:
    """Compile, like `kernel`, a function that neither creates nor returns arrays.

    Skips reference counting of its array arguments, which can take longer than the body of an inner loop. A function
    that creates an array fails to compile.
    """
    return cast(_Function, _compiled(function, _nrt=False))


def inlined(function: _Function) -> _Function:
    """Compile, like `leaf`, a formula that is always inlined into its callers."""
    return cast(_Function, _compiled(function, _nrt=False, forceinline=True))


def is_kept(compiled: Any) -> bool:
    """Return whether the disk cache or the wheel has this function compiled from the same sources."""
    kept = getattr(compiled, "_cache", None)  # plain functions, under NUMBA_DISABLE_JIT, have none
    return isinstance(kept, _PackageCache) and kept.has_entries()


@contextmanager
def timed_loading() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds spent loading or compiling kernels since the block began."""
    listener = TimingListener()  # type: ignore[no-untyped-call]
    with install_listener(_COMPILE, listener):
        yield lambda: float(listener.duration) if listener.done else 0.0


@cache
def package_stamp(folder: Path) -> str:
    """Return the cache stamp of a folder's kernels: a hash of its sources, this package and the cost formula."""
    sources = (*sorted(folder.rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py")), _FORMULA)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def folder_of(function: Callable[..., Any]) -> Path:
    """Return the folder with a function and all its callees; for the planner's, the enclosing folder `compiled`."""
    folder = Path(inspect.getfile(function)).parent
    return next((parent for parent in folder.parents if parent.name == "compiled"), folder)


class _Index(IndexDataCacheFile):
    """numba's cache index of a function; an index that refers to removed classes counts as empty and is overwritten.

    numba unpickles an index before comparing its stamp, so without this a release that renames a class would fail on
    the cache of an earlier one.
    """

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (AttributeError, ImportError):
            return {}


class _PackageCache(FunctionCache):
    """numba's disk cache, with entries that are valid for one state of the function's whole folder.

    numba only checks the function's own file, but callees in other files are compiled into it, so their changes would
    go unnoticed. numba has no setting for this, so the stamp of its index is replaced here. Entries with another stamp
    are ignored and later overwritten, as numba does after a change of the file itself; nothing is deleted.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = package_stamp(folder_of(function))
        self._cache_file: Any
        self._shipped: Any
        self._cache_file, self._shipped = (
            _Index(folder, self._impl.filename_base, stamp)  # type: ignore[no-untyped-call]
            for folder in (self.cache_path, SHIPPED)
        )

    def has_entries(self) -> bool:
        machine = cpu_target.target_context.codegen().magic_tuple()
        return any(key[1] == machine for file in (self._cache_file, self._shipped) for key in file._load_index())

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        with trigger_event(_COMPILE, data={"dispatcher": self}):  # count linking as loading time, too
            found = super()._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            if found is None and self._enabled:
                key = self._index_key(sig, target_context.codegen())  # type: ignore[no-untyped-call]
                data = self._shipped.load(key)
                found = None if data is None else self._impl.rebuild(target_context, data)
            return found


def _compiled(function: Any, **options: Any) -> Any:
    if _CONFIG.DISABLE_JIT:
        return function
    compiled: Any = Kernel(function, targetoptions={"nopython": True, "nogil": True, "boundscheck": None, **options})
    # OSError: not even a temporary folder can be created.
    with suppress(RuntimeError, OSError):
        compiled._cache = _package_cache(function)  # like numba's `enable_caching`
    return compiled


def _package_cache(function: Any) -> _PackageCache:
    try:
        return _PackageCache(function)
    except RuntimeError:
        # No writable cache folder, for example on a read-only file system. The wheel's kernels still load. New ones go
        # to a private folder of this process, since other users could tamper with one at a known path.
        _CONFIG.CACHE_DIR = _folder_of_this_process()
        return _PackageCache(function)


@cache
def _folder_of_this_process() -> str:
    folder = tempfile.mkdtemp(prefix="fcp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
