"""Read and update rows of packed tensors: as views if the rows are contiguous, else by cached indices.

On CUDA with triton each update is one fused kernel (`fused.py`); elsewhere torch operators do the same.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.runtime.kernels.base import lse_dtype, to_device
from fcp_cli.runtime.layouts.layout import Rows
from fcp_cli.runtime.ring_attention import fused

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
    if rows.span is None and first.shape == second.shape == third.shape and fused.fused_rows(lse.device.type):
        return fused.take_rows(first, second, third, lse, _positions(rows, lse.device))
    return take(first, rows), take(second, rows), take(third, rows), take(lse, rows)


def add(source: Tensor, into: Tensor, also: Tensor | None, rows: Rows, share: Tensor) -> None:
    """Add `share` [n, H, D] to rows of `source` and write the sum to `into`, which may be `source`, and to `also`.

    All are [T, H, D], of any types; the sum is rounded once, to the type of its destination.
    """
    if _fuses(source):
        view, positions = _placed(source, rows)
        fused.add_rows(view, _placed(into, rows)[0], None if also is None else _placed(also, rows)[0], positions, share)
    elif into is source and also is None and rows.span is not None:
        take(source, rows).add_(share)
    else:
        precise = lse_dtype(source.dtype)
        total = take(source, rows).to(precise) + share
        put(into, rows, total)
        if also is not None:
            put(also, rows, total)


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
        add(total[0], total[0], None, rows, first)
        add(total[1], total[1], None, rows, second)
        return
    if _fuses(total):
        # A view that starts at the rows needs no positions.
        positions = None if rows.span is not None else _positions(rows, total.device)
        halves = total if rows.span is None else total[:, rows.span[0] : rows.span[1]]
        fused.add_pair_rows(halves, positions, first, second)
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
        fused.merge_rows(
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
    return total.dtype != torch.float64 and fused.fused_rows(total.device.type)


def _placed(tensor: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return a view that starts at the rows and None, or the whole tensor and the rows' positions."""
    if rows.span is not None:
        return tensor[rows.span[0] : rows.span[1]], None
    return tensor, _positions(rows, tensor.device)


def _positions(rows: Rows, device: torch.device) -> Tensor:
    """Return the rows as an index tensor on `device`; copied there once."""
    if device not in rows.memo:
        rows.memo[device] = to_device(torch.as_tensor(rows.positions), device)
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
