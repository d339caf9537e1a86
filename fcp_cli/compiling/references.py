"""numba type that passes named tuples of arrays by reference: one pointer instead of hundreds of values.

numba passes a tuple member by member, and an array is seven members, which used to dominate compile time. The functions
need no change: a function owns the tuples that it creates and passes them by reference, and Python's caller keeps the
arguments alive. Tuples are immutable, so members are read in place.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.core.typeconv.castgraph import Conversion
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, box, lower_cast, lower_getattr_generic, models, register_model, unbox


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
