"""Read and update rows of packed tensors: as views if the rows are contiguous, else by cached indices.

On CUDA with triton each update is one fused kernel (`triton_rows`); elsewhere torch operators do the same.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fcp_cli.runtime.kernels.base import lse_dtype, to_device
from fcp_cli.runtime.layout import Rows
from fcp_cli.util.arrays import IntArray

Pair: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Two tensors [T, G, D]: halves of one [2, T, G, D] if they are alike, so that one operation serves both."""


def take(tensor: Tensor, rows: Rows) -> Tensor:
    """Return the rows of `tensor`, as a view if they are contiguous."""
    if rows.span is not None:
        return tensor[rows.span[0] : rows.span[1]]
    return tensor.index_select(0, _positions(rows, tensor.device))


def take_pair(pair: Pair, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the rows of both tensors of a pair; see `take`."""
    if isinstance(pair, tuple):
        return take(pair[0], rows), take(pair[1], rows)
    if rows.span is not None:
        start, stop = rows.span
        first, second = pair.narrow(1, start, stop - start).unbind()
    else:
        first, second = pair.index_select(1, _positions(rows, pair.device)).unbind()
    return first, second


def take_with_lse(
    tensors: tuple[Tensor, Tensor, Tensor], lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of three tensors [T, H, any D] and of `lse` [T, H]; see `take`."""
    first, second, third = tensors
    if rows.span is None and first.shape == second.shape == third.shape and fused_rows(lse.device.type):
        return take_rows(first, second, third, lse, _positions(rows, lse.device))
    return take(first, rows), take(second, rows), take(third, rows), take(lse, rows)


def add(source: Tensor, into: Tensor, rows: Rows, share: Tensor) -> None:
    """Add `share` [n, H, D] to rows of `source` and write the sum to `into`, which may be `source`.

    Both are [T, H, D], of any types; the sum is rounded once, to the type of `into`.
    """
    if _fuses(source):
        view, positions = _placed(source, rows)
        add_rows(view, _placed(into, rows)[0], positions, share)
    elif into is source and rows.span is not None:
        take(source, rows).add_(share)
    else:
        precise = lse_dtype(source.dtype)
        put(into, rows, take(source, rows).to(precise) + share)


def rows_at(positions: IntArray) -> Rows:
    """Return the rows at positions [n], n > 0, as a slice if they are consecutive."""
    first = int(positions[0])
    if np.array_equal(positions, np.arange(first, first + positions.size)):
        return Rows((first, first + positions.size))
    return Rows(None, positions)


def add_to_rows(total: Tensor, rows: Rows, share: Tensor) -> None:
    """Add `share` [n, ..] to distinct rows of `total` [T, ..] in place."""
    if rows.span is not None:
        take(total, rows).add_(share)
    else:
        # index_add_ and index_copy_ require values of the target's data type.
        total.index_add_(0, _positions(rows, total.device), share.to(total.dtype))


def add_pair(total: Pair, rows: Rows, first: Tensor, second: Tensor) -> None:
    """Add `first` and `second` to the rows of the two tensors of `total`, in place."""
    if isinstance(total, tuple):
        add(total[0], total[0], rows, first)
        add(total[1], total[1], rows, second)
        return
    if _fuses(total):
        # A view that starts at the rows needs no positions.
        positions = None if rows.span is not None else _positions(rows, total.device)
        halves = total if rows.span is None else total[:, rows.span[0] : rows.span[1]]
        add_pair_rows(halves, positions, first, second)
        return
    if rows.span is not None:
        for half, share in zip(take_pair(total, rows), (first, second), strict=True):
            half.add_(share)
    else:
        for half, share in zip(total, (first, second), strict=True):
            half.index_add_(0, _positions(rows, total.device), share.to(total.dtype))


def merge(
    source: Tensor,
    into: Tensor,
    also: Tensor | None,
    lse: Tensor,
    rows: Rows,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """Merge attention over further keys into rows of `source`; write to `into`, which may be `source`, and to `also`.

    The further keys weigh w = exp(part_lse - logaddexp(lse, part_lse)) = sigmoid(part_lse - lse), so the merged rows
    are (1 - w) source + w part, in the precision of `lse`, and lse := logaddexp(lse, part_lse).

    Args:
        source, into, also: [T, H, D] of any types.
        lse: [T, H], changed in place.
        rows: n of the T rows.
        part, part_lse: [n, H, D] and [n, H], over the further keys only.
    """
    if _fuses(lse):
        view, positions = _placed(source, rows)
        merge_rows(
            view,
            _placed(into, rows)[0],
            None if also is None else _placed(also, rows)[0],
            _placed(lse, rows)[0],
            positions,
            part,
            part_lse,
        )
        return
    old, old_lse = take(source, rows), take(lse, rows)
    # A row without earlier keys has lse -inf and becomes the part itself: sigmoid(inf) is 1.
    weight = torch.sigmoid(part_lse - old_lse).unsqueeze(-1)
    # After the weight, which needs the old lse.
    torch.logaddexp(old_lse, part_lse, out=old_lse)
    is_view = rows.span is not None
    if not is_view:  # gathered rows are a copy; a view has already updated `lse`
        put(lse, rows, old_lse)
    in_place = into is source and old.dtype == lse.dtype
    merged = (old.lerp_ if in_place else old.to(lse.dtype).lerp)(part.to(lse.dtype), weight)
    if not (in_place and is_view):
        put(into, rows, merged)
    if also is not None:
        put(also, rows, merged)


def put(target: Tensor, rows: Rows, values: Tensor) -> None:
    """Write `values` to the rows of `target`."""
    if rows.span is not None:
        target[rows.span[0] : rows.span[1]].copy_(values)
    else:
        target.index_copy_(0, _positions(rows, target.device), values.to(target.dtype))


def _fuses(total: Tensor) -> bool:
    """Return whether the fused operators support a tensor: they accumulate in fp32, so not fp64."""
    return total.dtype != torch.float64 and fused_rows(total.device.type)


def _placed(tensor: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return a view that starts at the rows and None, or the whole tensor and the rows' positions."""
    if rows.span is not None:
        return tensor[rows.span[0] : rows.span[1]], None
    return tensor, _positions(rows, tensor.device)


def _positions(rows: Rows, device: torch.device) -> Tensor:
    """Return the rows as an index tensor on `device`; copied there once."""
    if device not in rows.memo:
        rows.memo[device] = to_device(torch.as_tensor(rows.positions, device="cpu"), device)
    positions: Tensor = rows.memo[device]
    return positions


def pack(batched: Tensor, tokens: int) -> Tensor:
    """View [1, H, padded, D] as [tokens, H, D], with the last dimension contiguous as kernels require."""
    packed = batched[0].transpose(0, 1)[:tokens]
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def unpack(packed: Tensor, padded: int) -> Tensor:
    """Turn [tokens, H, D] into [1, H, padded, D] with zeros as padding."""
    if packed.shape[0] < padded:
        full = packed.new_zeros(padded, *packed.shape[1:])
        full[: packed.shape[0]] = packed
        packed = full
    return packed.transpose(0, 1).unsqueeze(0)


# Fused Triton operators for CUDA: one pass over memory instead of torch's several.
#
# They are registered under `fcp::`, so that profiles name them and meta tensors can trace them without triton or a
# GPU. `fused_rows` tells whether a device has them; elsewhere the functions above use torch operators.

_VARIABLE = "FCP_TRITON"

# `(a!)` marks a tensor that is written to, so that torch neither reorders nor drops the call.
_SCHEMAS = {
    "merge_rows": "(Tensor source, Tensor(a!) into, Tensor(b!)? also, Tensor(c!) lse, Tensor? positions, Tensor part, "
    "Tensor part_lse) -> ()",
    "add_rows": "(Tensor source, Tensor(a!) into, Tensor? positions, Tensor share) -> ()",
    "add_pair_rows": "(Tensor(a!) total, Tensor? positions, Tensor first, Tensor second) -> ()",
    "take_rows": "(Tensor first, Tensor second, Tensor third, Tensor lse, Tensor positions) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
}


@lru_cache(maxsize=8)
def fused_rows(device_type: str) -> bool:
    """Return whether a device type has the operators: CUDA with triton installed, unless FCP_TRITON=0."""
    return device_type == "cuda" and os.environ.get(_VARIABLE) != "0" and find_spec("triton") is not None


def merge_rows(
    source: Tensor,
    into: Tensor,
    also: Tensor | None,
    lse: Tensor,
    positions: Tensor | None,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """Merge partial results; see `rows.merge`.

    Args:
        source, into, also: [T, H, D] contiguous.
        lse: [T, H] fp32, any strides.
        positions: [n] int64 distinct rows to merge into, or None for the first n.
        part: [n, H, D]
        part_lse: [n, H] fp32, any strides.
    """
    torch.ops.fcp.merge_rows(source, into, also, lse, positions, part, part_lse)


def add_rows(source: Tensor, into: Tensor, positions: Tensor | None, share: Tensor) -> None:
    """Add `share` [n, H, D] to rows in fp32; see `rows.add` and, for the other arguments, `merge_rows`."""
    torch.ops.fcp.add_rows(source, into, positions, share)


def add_pair_rows(total: Tensor, positions: Tensor | None, first: Tensor, second: Tensor) -> None:
    """Add two shares [n, G, D] in fp32; see `rows.add_pair`. `total` is [2, T, G, D] with contiguous halves."""
    torch.ops.fcp.add_pair_rows(total, positions, first, second)


def take_rows(
    first: Tensor, second: Tensor, third: Tensor, lse: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather rows of three tensors [T, H, D] and of lse [T, H]; the gathered lse is a view of [H, n]."""
    taken: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.fcp.take_rows(first, second, third, lse, positions)
    return taken


def _launch(name: str) -> Any:
    """Return the CUDA implementation of an operator, which imports triton at its first call."""

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module("fcp_cli.runtime.triton_rows"), name)(*args)

    return run


def _taken_shapes(
    first: Tensor, second: Tensor, third: Tensor, lse: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, (heads, head_dim) = positions.shape[0], first.shape[1:]
    taken = [tensor.new_empty(rows, heads, head_dim) for tensor in (first, second, third)]
    return taken[0], taken[1], taken[2], lse.new_empty(heads, rows).t()


def _define(library: Any) -> Any:
    """Define the operators for CUDA and meta tensors; they exist as long as the returned library."""
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _launch(name), "CUDA")
        library.impl(name, _taken_shapes if name == "take_rows" else lambda *_: None, "Meta")
    return library


_library = _define(torch.library.Library("fcp", "DEF"))  # type: ignore[no-untyped-call]
