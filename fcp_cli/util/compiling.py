"""Decorators that compile inner loops on their first call and cache them on disk.

No fast-math and no threads, so that results are bitwise equal and every machine makes the same plan. The target is a
generic processor of the architecture, so that kernels in a wheel (`make wheel`) or a shared home folder work on all
machines, without loss of speed. This applies to everything that numba compiles in this process;
`NUMBA_CPU_NAME=host` targets the local processor instead.

By default numba compiles every function several times: to machine code with a Python wrapper, with a C wrapper, and
again inside each caller, which took over a minute for a planner of 150 functions. Here a callee is typed and lowered
once, as a part, and linked as LLVM code into the entry points that Python calls (`Kernel`); only those become machine
code. Compile time is linear in the size of the functions.

numba also passes a named tuple member by member, and an array is seven members, which used to dominate compile time.
Here named tuples of arrays are passed by reference, as one pointer (`Reference`). The functions need no change: a
function owns the tuples that it creates and passes them by reference, and Python's caller keeps the arguments alive.
Tuples are immutable, so members are read in place.

Of numba's internals, `Kernel` extends the dispatcher, `_EntryCompiler` the compiler, and two libraries the linking of
LLVM code; the cache is numba's own, with other files. Tried with numba 0.59.1, 0.61.2, 0.65.1 and 0.68.1.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from llvmlite import ir
from llvmlite.binding import Linkage
from numba.core import cgutils, config, types
from numba.core import typed_passes as typed
from numba.core import untyped_passes as untyped
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.errors import TypingError
from numba.core.event import TimingListener, install_listener, trigger_event
from numba.core.imputils import impl_ret_borrowed
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.sigutils import normalize_signature
from numba.core.typeconv.castgraph import Conversion
from numba.core.typing.templates import AttributeTemplate, infer_getattr, make_concrete_template
from numba.extending import NativeValue, box, lower_cast, lower_getattr_generic, models, register_model, unbox

from fcp_cli.util.console import note

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
    kept = getattr(getattr(compiled, "_cache", None), "_cache_file", None)  # plain functions have none
    return isinstance(kept, CacheFiles) and kept.has_entries()


@contextmanager
def timed_loading() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds spent loading or compiling kernels since the block began."""
    listener = TimingListener()
    with install_listener(_COMPILE, listener):
        yield lambda: float(listener.duration) if listener.done else 0.0


@cache
def package_stamp(folder: Path) -> str:
    """Return the cache stamp of a folder's kernels: a hash of its sources, this file and the cost formula."""
    sources = (*sorted(folder.rglob("*.py")), Path(__file__), _FORMULA)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def folder_of(function: Callable[..., Any]) -> Path:
    """Return the folder with a function and all its callees; for the planner's, the enclosing folder `compiled`."""
    folder = Path(inspect.getfile(function)).parent
    return next((parent for parent in folder.parents if parent.name == "compiled"), folder)


_told_to_wait: list[str] = []  # one line per process, however many kernels it waits for
_LONGEST_WAIT_SECONDS: Final = 300.0  # the other process may be stopped
_POLL_SECONDS: Final = 0.1


def wait_silently() -> None:
    """Print no line while other processes compile: the caller has said that it takes a while."""
    _told_to_wait.append("")


class CompileLock:
    """Lock of a kernel's cache, so that one process of a machine compiles it and the others load the result.

    It is an flock, which ends with its process. File systems without flock have no lock: every process compiles.
    """

    def __init__(self, path: Path, function: str) -> None:
        self._path, self._function = path, function
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Wait until no other process holds the lock, but not forever."""
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        with suppress(OSError):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            while not self._is_taken_now() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let the next process have the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_taken_now(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _told_to_wait:
                _told_to_wait.append(self._function)
                owner = os.pread(self._descriptor, 20, 0).decode("ascii", "replace") or "?"
                note(
                    f"process {owner} compiles {self._function} for this machine (a minute or two for the whole "
                    f"planner, once); waiting for it, at most {_LONGEST_WAIT_SECONDS:.0f} s"
                )
            return False
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        return True


class CacheFiles:
    """Cache files of a kernel, on this machine and in the wheel; replaces the file object of numba's cache.

    Entries are valid for one state of the function's whole folder. numba only checks the function's own file, but
    callees in other files are compiled into it, so their changes would go unnoticed. Entries with another stamp are
    ignored and later overwritten, as numba does after a change of the file itself; nothing is deleted.

    numba unpickles an index before comparing its stamp, so an index of an earlier release may name a class that is gone
    (AttributeError, ImportError). It counts as empty.
    """

    def __init__(self, function: Callable[..., Any], folder: str, filename_base: str) -> None:
        stamp = package_stamp(folder_of(function))
        self.local: Any = IndexDataCacheFile(folder, filename_base, stamp)
        self._shipped: Any = IndexDataCacheFile(str(SHIPPED), filename_base, stamp)
        self.lock = CompileLock(Path(folder) / f".{filename_base}.lock", function.__name__)

    def has_entries(self) -> bool:
        """Return whether any entry is for the processors that this process compiles for."""
        machine = cpu_target.target_context.codegen().magic_tuple()
        for file in (self.local, self._shipped):
            with suppress(AttributeError, ImportError):
                if any(key[1] == machine for key in file._load_index()):
                    return True
        return False

    def load(self, key: Any) -> Any:
        """Return an entry, or None while holding the lock, to compile it: `Kernel.compile` releases it."""
        found = self._kept(key)
        if found is None:
            self.lock.acquire()
            found = self._kept(key)
        return found

    def _kept(self, key: Any) -> Any:
        for file in (self.local, self._shipped):
            with suppress(AttributeError, ImportError):
                found = file.load(key)
                if found is not None:
                    return found
        return None

    def save(self, key: Any, data: Any) -> None:
        try:
            self.local.save(key, data)
        except (AttributeError, ImportError):
            self.local.flush()
            self.local.save(key, data)


def _compiled(function: Any, **options: Any) -> Any:
    if _CONFIG.DISABLE_JIT:
        return function
    compiled: Any = Kernel(function, targetoptions={"nopython": True, "nogil": True, "boundscheck": None, **options})
    # OSError: not even a temporary folder can be created.
    with suppress(RuntimeError, OSError):
        compiled._cache = _disk_cache(function)  # like numba's `enable_caching`
    return compiled


def _disk_cache(function: Any) -> FunctionCache:
    try:
        kept: Any = FunctionCache(function)
    except RuntimeError:
        # No writable cache folder, for example on a read-only file system. The wheel's kernels still load. New ones go
        # to a private folder of this process, since other users could tamper with one at a known path.
        _CONFIG.CACHE_DIR = _folder_of_this_process()
        kept = FunctionCache(function)
    kept._cache_file = CacheFiles(function, kept.cache_path, kept._impl.filename_base)
    return cast(FunctionCache, kept)


@cache
def _folder_of_this_process() -> str:
    folder = tempfile.mkdtemp(prefix="fcp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Kernel(CPUDispatcher):
    """Dispatcher of a compiled function: an entry point for Python, cached on disk, and a part of compiled callers."""

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(py_func, locals, targetoptions)
        options = {**self.targetoptions, "no_cfunc_wrapper": True}
        # `_nrt`: the wrapper releases references to Python's arguments.
        self._compiler: Any = _FrontEnd(py_func, cpu_target, {**options, "_nrt": True}, {}, _EntryCompiler)
        self._part_compiler: Any = _FrontEnd(
            py_func, cpu_target, {**options, "no_cpython_wrapper": True}, {}, _PartCompiler
        )
        self._parts: dict[tuple[Any, ...], Any] = {}

    def typeof_pyval(self, value: Any) -> Any:
        return by_reference(super().typeof_pyval(value))

    def compile(self, sig: Any) -> Any:
        kept = getattr(vars(self).get("_cache"), "_cache_file", None)
        with global_compiler_lock, trigger_event(_COMPILE, data={"dispatcher": self}):  # linking is loading time, too
            try:
                return super().compile(sig)
            finally:
                if isinstance(kept, CacheFiles):
                    kept.lock.release()

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the call template of a call from a compiled function; overrides numba's dispatcher."""
        signature, args = self._compiler.fold_argument_types(args, kws)
        # Not by the literal: `f(i, 0)` calls the part that `f(i, k)` calls, and LLVM inlines what gains by it.
        kinds = tuple(by_reference(types.unliteral(kind)) for kind in args)
        if kinds not in self._parts:
            part = self._part_compiler.compile(kinds, None)
            if has_reference(part.signature.return_type):  # its arrays may be freed before the caller reads them
                raise TypingError(f"{self.py_func.__name__} returns a tuple that it was given, to a compiled function")
            self._parts[kinds] = part
            self.targetctx.insert_user_function(part.fndesc, part.fndesc, [part.library])
        name, signatures = self.py_func.__name__, [part.signature for part in self._parts.values()]
        return make_concrete_template(name, key=name, signatures=signatures), signature, kinds, {}

    def get_overload(self, sig: Any) -> Any:
        """Return the function descriptor of the part that a compiled call runs."""
        kinds, _result = normalize_signature(sig)
        return self._parts[tuple(kinds)].fndesc


# All that kernels need: numba's passes for closures, literals, None and array expressions take a tenth of the time.
_UNTYPED: Final = (
    untyped.TranslateByteCode,
    untyped.FixupArgs,
    untyped.IRProcessing,
    untyped.GenericRewrites,
    untyped.ReconstructSSA,
)
_TYPED: Final = (typed.NopythonTypeInference, typed.PreLowerStripPhis, typed.IRLegalization, typed.NativeLowering)


class _FrontEnd(_FunctionCompiler):
    """Shares one object among functions with equal flags: numba compares the 30 flags of two callers 130,000 times."""

    _shared: Final[dict[str, Any]] = {}

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = self.pipeline_class.is_part
        return self._shared.setdefault(flags.summary(), flags)


class _EntryCompiler(Compiler):
    """Compiler of a function as an entry point, together with all its parts."""

    is_part = False

    def define_pipelines(self) -> Any:
        pipeline = PassManager("kernel")
        for one in (*_UNTYPED, *_TYPED, typed.NoPythonBackend):
            pipeline.add_pass(one, one.__name__)
        pipeline.finalize()
        return [pipeline]

    def compile_extra(self, func: Any) -> Any:
        library = _PartLibrary if self.is_part else _EntryLibrary
        self.state.library = library(self.state.targetctx.codegen(), func.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(func)


class _PartCompiler(_EntryCompiler):
    """Compiler of a function as a part of its callers, without machine code of its own."""

    is_part = True


class _EntryLibrary(JITCodeLibrary):
    """Machine code of an entry point and all its parts."""

    def finalize(self) -> None:
        # Parts first: LLVM only links functions of numba's own libraries that are referenced by then.
        libraries, self._linking_libraries = self._linking_libraries, []
        parts: dict[_PartLibrary, None] = {}
        while libraries:
            library = libraries.pop()
            if not isinstance(library, _PartLibrary):
                self._linking_libraries.append(library)
            elif library not in parts:
                parts[library] = None
                libraries.extend(library._linking_libraries)
        for part in parts:
            self._final_module.link_in(part._final_module, preserve=True)
        for name in (name for part in parts for name in part.names):
            self._final_module.get_function(name).linkage = "internal"
        super().finalize()


class _PartLibrary(JITCodeLibrary):
    """Unoptimized LLVM code of a part, to be linked into entry points; `names` lists its external functions."""

    names: tuple[str, ...] = ()

    def add_llvm_module(self, ll_module: Any) -> None:
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        functions = (one for one in self._final_module.functions if not one.is_declaration)
        self.names = tuple(one.name for one in functions if one.linkage == Linkage.external)
        self._finalized = True


class Reference(types.Type):
    """Type of a reference to a named tuple that the caller keeps alive."""

    def __init__(self, referenced: Any) -> None:
        self.referenced = referenced
        # Short, because the type name is part of the mangled name of every function that takes it.
        digest = hashlib.sha256(str(referenced).encode()).hexdigest()[:12]
        super().__init__(f"{referenced.instance_class.__name__}_{digest}")

    def unify(self, typingctx: Any, other: Any) -> Any:
        """Return the tuple type for a variable that may hold a reference or an owned tuple; it then holds a copy."""
        return other if other == self.referenced else None

    def can_convert_to(self, typingctx: Any, other: Any) -> Any:
        return Conversion.safe if other == self.referenced else None


_KNOWN: Final[dict[Any, Any]] = {}


def by_reference(kind: Any) -> Any:
    """Return the argument type of a value: a reference for named tuples with arrays, else the type itself."""
    if not isinstance(kind, types.BaseNamedTuple) or not _has_arrays(kind):
        return kind
    if kind not in _KNOWN:
        _KNOWN[kind] = Reference(kind)
    return _KNOWN[kind]


def has_reference(kind: Any) -> bool:
    """Return whether a type is a reference or contains one."""
    members: Any = kind if isinstance(kind, types.BaseTuple) else ()
    return isinstance(kind, Reference) or any(has_reference(member) for member in members)


def _has_arrays(kind: Any) -> bool:
    return any(isinstance(one, types.Array) or (isinstance(one, types.BaseTuple) and _has_arrays(one)) for one in kind)


@register_model(Reference)
class _Pointer(models.PrimitiveModel):
    def __init__(self, dmm: Any, kind: Any) -> None:
        super().__init__(dmm, kind, dmm.lookup(kind.referenced).get_value_type().as_pointer())


@infer_getattr
class _Members(AttributeTemplate):
    key = Reference

    def generic_resolve(self, kind: Any, name: str) -> Any:  # type: ignore[override]
        if name in kind.referenced.fields:
            return by_reference(kind.referenced[kind.referenced.fields.index(name)])
        return None


@lower_getattr_generic(Reference)
def _member(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    place = kind.referenced.fields.index(name)
    _promise(builder, value)
    member = builder.gep(value, [ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), place)], inbounds=True)
    member_kind = by_reference(kind.referenced[place])
    if isinstance(member_kind, Reference):
        return member
    return impl_ret_borrowed(context, builder, member_kind, builder.load(member))


def _promise(builder: Any, value: Any) -> None:
    """Mark a tuple argument as not aliased by any write of the function, so that LLVM loads its members only once."""
    if value in builder.function.args:
        value.add_attribute("noalias")


@lower_cast(types.BaseNamedTuple, Reference)
def _refer(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


@lower_cast(Reference, types.BaseNamedTuple)
def _copy(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
    return builder.load(value)  # the owner of the tuple holds the references to its arrays


@unbox(Reference)
def _unboxed(kind: Any, value: Any, c: Any) -> Any:
    native = c.unbox(kind.referenced, value)

    def release() -> None:
        if native.cleanup is not None:
            native.cleanup()
        c.context.nrt.decref(c.builder, kind.referenced, native.value)

    place = _refer(c.context, c.builder, None, None, native.value)
    return NativeValue(place, cleanup=release, is_error=native.is_error)


@box(Reference)
def _boxed(kind: Any, value: Any, c: Any) -> Any:
    """Convert a reference to a Python tuple; it can only be an argument from Python."""
    copied = c.builder.load(value)
    return c.box(kind.referenced, impl_ret_borrowed(c.context, c.builder, kind.referenced, copied))
