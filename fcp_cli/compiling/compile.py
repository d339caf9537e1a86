"""Compiles inner loops, the planner's and the pipelines': on their first call, and kept on disk for later runs.

Without fast-math and without threads: every machine computes the same bits, so every machine makes the same plan. And
for any processor of an architecture, not for the one at hand: kernels of a wheel (`make wheel`), or of a home folder
that machines share, then serve all of them, and are as quick. Other functions that numba compiles in this
process are for any processor, too; `NUMBA_CPU_NAME=host` has all of them for the one at hand.
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
_FORMULA: Final = Path(__file__).parents[1] / "cost" / "formula.py"  # compiled into functions of other folders

_CONFIG: Final[Any] = config
if _CONFIG.CPU_NAME is None:  # unless somebody chose one by NUMBA_CPU_NAME
    _CONFIG.CPU_NAME, _CONFIG.CPU_FEATURES = "generic", ""


def kernel(function: _Function) -> _Function:
    """Compile a function on its first call, and keep the result on disk where some folder can be written."""
    return cast(_Function, _compiled(function))


def leaf(function: _Function) -> _Function:
    """Compile, as `kernel`, a function that makes no arrays and returns none.

    It then counts no references to the arrays that it is given, which takes longer than the body of many inner loops;
    one that does make an array fails to compile.
    """
    return cast(_Function, _compiled(function, _nrt=False))


def inlined(function: _Function) -> _Function:
    """Compile a formula into the inner loops that use it; otherwise as `leaf`."""
    return cast(_Function, _compiled(function, _nrt=False, forceinline=True))


def is_kept(compiled: Any) -> bool:
    """Return whether an earlier run, or the wheel, left this function compiled, from the same sources, on disk."""
    kept = getattr(compiled, "_cache", None)  # a plain function has none: under NUMBA_DISABLE_JIT nothing is compiled
    return isinstance(kept, _PackageCache) and kept.has_entries()


@contextmanager
def timed_loading() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the block began in which this process loaded or compiled."""
    listener = TimingListener()  # type: ignore[no-untyped-call]
    with install_listener(_COMPILE, listener):
        yield lambda: float(listener.duration) if listener.done else 0.0


@cache
def package_stamp(folder: Path) -> str:
    """Return the key of a folder's kernels: the hash of its sources, of their compilers and of the cost formula."""
    sources = (*sorted(folder.rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py")), _FORMULA)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def folder_of(function: Callable[..., Any]) -> Path:
    """Return the folder of a function and of all that it calls; of the planner's, the one around its parts."""
    folder = Path(inspect.getfile(function)).parent
    return next((parent for parent in folder.parents if parent.name == "compiled"), folder)


class _Index(IndexDataCacheFile):
    """numba's index of a function on disk; one that names classes that are gone counts as empty, and is overwritten.

    It is unpickled before its stamp is compared, so that a release that renames a class could not plan where an earlier
    one left its kernels.
    """

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (AttributeError, ImportError):
            return {}


class _PackageCache(FunctionCache):
    """numba's cache on disk, whose entries count only for one state of the whole folder that a function stands in.

    numba compares the file in which a function stands; but functions that it calls are compiled into it and stand in
    other files of the folder, so that a change there would go unseen. numba has no setting for this: the stamp that its
    index of a function carries is exchanged here. Entries under another stamp are passed over, and overwritten by the
    next ones of their name, as numba does after a change of the file itself; nothing is deleted.
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
        with trigger_event(_COMPILE, data={"dispatcher": self}):  # linking takes a while, too
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
    # An OSError: not even a temporary folder can be made.
    with suppress(RuntimeError, OSError):
        compiled._cache = _package_cache(function)  # as `enable_caching` does with numba's own
    return compiled


def _package_cache(function: Any) -> _PackageCache:
    try:
        return _PackageCache(function)
    except RuntimeError:
        # numba found no folder to write to, as in a container with a read-only file system. Kernels of the wheel are
        # read all the same; new ones are not kept, since other users might write to a folder that all can find.
        _CONFIG.CACHE_DIR = _folder_of_this_process()
        return _PackageCache(function)


@cache
def _folder_of_this_process() -> str:
    folder = tempfile.mkdtemp(prefix="fcp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
