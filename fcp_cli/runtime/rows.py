"""Read and update some rows of a packed tensor: views where the rows are contiguous, cached indices elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layout import Rows


def take(tensor: Tensor, rows: Rows) -> Tensor:
    """Return the rows of `tensor`; a view where they are contiguous."""
    if rows.span is not None:
        return tensor[rows.span[0] : rows.span[1]]
    return tensor.index_select(0, _positions(rows, tensor.device))


def add(total: Tensor, rows: Rows, share: Tensor) -> None:
    """Add `share` to the rows of `total`, in place."""
    if rows.span is not None:
        total[rows.span[0] : rows.span[1]].add_(share)
    else:
        total.index_add_(0, _positions(rows, total.device), share.to(total.dtype))


def merge(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
    """Fold attention over further keys into `out` and `lse` at `rows`, in place.

    The further keys weigh w = exp(part_lse - logaddexp(lse, part_lse)) = sigmoid(part_lse - lse), so
    out := (1 - w) out + w part, and lse := logaddexp(lse, part_lse).
    """
    merged_out, merged_lse = take(out, rows), take(lse, rows)
    weight = torch.sigmoid(part_lse - merged_lse).unsqueeze(-1)
    merged_out.lerp_(part.to(out.dtype), weight)
    torch.logaddexp(merged_lse, part_lse, out=merged_lse)
    if rows.span is None:  # what was gathered is a copy; views have changed `out` and `lse` already
        positions = _positions(rows, out.device)
        out.index_copy_(0, positions, merged_out)
        lse.index_copy_(0, positions, merged_lse)


def _positions(rows: Rows, device: torch.device) -> Tensor:
    """Return the rows as an index tensor on `device`, moved there once."""
    if device not in rows.memo:
        rows.memo[device] = to_device(torch.as_tensor(rows.positions), device)
    positions: Tensor = rows.memo[device]
    return positions
