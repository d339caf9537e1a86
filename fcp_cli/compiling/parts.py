"""numba dispatcher that compiles functions together with their callees, in time linear in their size.

By default numba compiles every function several times: to machine code with a Python wrapper, with a C wrapper, and
again inside each caller, which took over a minute for a planner of 150 functions. Here a callee is typed and lowered
once and linked as LLVM code into the entry points that Python calls; only those become machine code. Named tuples are
passed by reference (`references`).
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags, compile_extra
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.errors import TypingError
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.sigutils import normalize_signature
from numba.core.typing.templates import make_concrete_template

from fcp_cli.compiling.references import by_reference, has_reference


class Kernel(CPUDispatcher):
    """Dispatcher of a compiled function: an entry point for Python, cached on disk, and a part of compiled callers."""

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(py_func, locals, targetoptions)
        self._compiler = _Compiler(py_func, self.targetoptions, is_part=False)
        self._part_compiler = _Compiler(py_func, self.targetoptions, is_part=True)
        self._parts: dict[tuple[Any, ...], Any] = {}

    def typeof_pyval(self, value: Any) -> Any:
        return by_reference(super().typeof_pyval(value))

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the call template of a call from a compiled function; overrides numba's dispatcher."""
        signature, args = self._compiler.fold_argument_types(args, kws)
        kinds = tuple(by_reference(kind) for kind in args)
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


class _Flags(Flags):
    """Compilation flags with a fast comparison of set flags only, since numba compares them many thousand times."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flags):
            return NotImplemented
        mine, its = self._values, other._values
        return bool(mine == its) or all(getattr(self, name) == getattr(other, name) for name in {*mine, *its})

    def __hash__(self) -> int:
        return _HASH_OF_FLAGS


_HASH_OF_FLAGS: Final = hash(Flags())  # constant, as in numba's own flags


class _Compiler(_FunctionCompiler):
    """Compiler of a function as an entry point, or as a part of its callers."""

    def __init__(self, function: Any, options: dict[str, Any], *, is_part: bool) -> None:
        own = {"no_cfunc_wrapper": True, "no_cpython_wrapper": is_part}
        if not is_part:
            own["_nrt"] = True  # the wrapper releases references to Python's arguments
        super().__init__(function, cpu_target, {**options, **own}, {}, Compiler)
        self._is_part = is_part

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        flags: Any = _Flags()
        context = cpu_target.target_context
        cpu_target.options.parse_as_flags(flags, self.targetoptions)
        flags.no_compile = self._is_part
        library = (_PartLibrary if self._is_part else _Whole)(context.codegen(), self.py_func.__qualname__)
        library.enable_object_caching()
        return compile_extra(
            cpu_target.typing_context,
            context,
            self.py_func,
            args,
            return_type,
            flags,
            self.locals,
            library=library,
            pipeline_class=self.pipeline_class,
        )


class _Whole(JITCodeLibrary):
    """Machine code of an entry point and all its parts."""

    def add_linking_library(self, library: Any) -> None:
        if library in self._linking_libraries:
            return
        super().add_linking_library(library)
        if isinstance(library, _PartLibrary):
            for more in library._linking_libraries:
                self.add_linking_library(more)

    def finalize(self) -> None:
        # Parts first: LLVM only links functions of numba's own libraries that are referenced by then.
        self._linking_libraries.sort(key=lambda library: not isinstance(library, _PartLibrary))
        super().finalize()

    def _optimize_final_module(self) -> None:
        for library in self._linking_libraries:
            if isinstance(library, _PartLibrary):
                for name in library.names:
                    self._final_module.get_function(name).linkage = "internal"
        super()._optimize_final_module()


class _PartLibrary(JITCodeLibrary):
    """Unoptimized LLVM code of a part, to be linked into its callers; `names` lists its external functions."""

    names: tuple[str, ...] = ()

    def add_llvm_module(self, ll_module: Any) -> None:
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        functions = (one for one in self._final_module.functions if not one.is_declaration)
        self.names = tuple(one.name for one in functions if one.linkage == Linkage.external)
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        return self._final_module
