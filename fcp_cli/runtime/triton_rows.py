"""Triton kernels for rows of packed tensors: merge partial results, add gradients, gather. Imports triton.

Every kernel reads and writes each byte once. A program handles one row or a part of one, and finds scattered rows
itself, so no gather or scatter is needed around it. Positions are distinct, so programs never write the same row and
results are deterministic.

Arguments of kernels have no annotations but Triton's own, since Triton compiles these, too, and refuses other names.

Strides and addresses of log-sum-exps are not specialized, as Triton does by default: they vary with the lengths of a
pack, and Triton would compile a kernel again in the middle of a ring.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a row per program that adds


_OF_LSE = ("lse_row", "lse_head", "part_lse_row", "part_lse_head")


@triton.jit(do_not_specialize=_OF_LSE, do_not_specialize_on_alignment=("lse", "part_lse"))  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    source,
    into,
    also,
    lse,
    part,
    part_lse,
    positions,
    lse_row,
    lse_head,
    part_lse_row,
    part_lse_head,
    heads,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HAS_ALSO: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    # int64, as in all kernels here: row * heads * head size exceeds 2^31 in long shards.
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_POSITIONS:
        target = tl.load(positions + row)
    head = tl.arange(0, HEADS_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    is_head = head < heads
    is_element = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    element = head[:, None] * HEAD_DIM + dim[None, :]
    at = target * heads * HEAD_DIM + element

    old_lse = tl.load(lse + target * lse_row + head * lse_head, mask=is_head, other=0.0)
    new_lse = tl.load(part_lse + row * part_lse_row + head * part_lse_head, mask=is_head, other=0.0)
    old = tl.load(source + at, mask=is_element, other=0.0).to(tl.float32)
    new = tl.load(part + row * heads * HEAD_DIM + element, mask=is_element, other=0.0).to(tl.float32)
    # Subtract the maximum, so that neither exponential overflows.
    largest = tl.maximum(old_lse, new_lse)
    old_share, new_share = tl.exp(old_lse - largest), tl.exp(new_lse - largest)
    total = old_share + new_share
    merged = old + (new_share / total)[:, None] * (new - old)
    merged_lse = largest + tl.log(total)
    tl.store(into + at, merged.to(into.dtype.element_ty), mask=is_element)
    if HAS_ALSO:
        tl.store(also + at, merged.to(also.dtype.element_ty), mask=is_element)
    tl.store(lse + target * lse_row + head * lse_head, merged_lse, mask=is_head)


def merge_rows(
    source: Tensor,
    into: Tensor,
    also: Tensor | None,
    lse: Tensor,
    positions: Tensor | None,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """See `fused.merge_rows`."""
    rows, heads, head_dim = part.shape
    _check_contiguous(source, into, also)
    part = part.contiguous()
    if not rows:
        return
    _merge_kernel[(rows,)](
        source,
        into,
        # Triton requires a pointer even for an argument that the flag makes the kernel ignore.
        into if also is None else also,
        lse,
        part,
        part_lse,
        lse if positions is None else positions,
        *lse.stride(),
        *part_lse.stride(),
        heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=triton.next_power_of_2(heads),  # `tl.arange` requires powers of two
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HAS_ALSO=also is not None,
        HAS_POSITIONS=positions is not None,
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    source,
    into,
    share,
    positions,
    width,
    BLOCK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_POSITIONS:
        target = tl.load(positions + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    at = target * width + column
    added = tl.load(source + at, mask=is_column, other=0.0).to(tl.float32)
    added += tl.load(share + row * width + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(into + at, added.to(into.dtype.element_ty), mask=is_column)


def add_rows(source: Tensor, into: Tensor, positions: Tensor | None, share: Tensor) -> None:
    """See `fused.add_rows`."""
    rows, heads, head_dim = share.shape
    _check_contiguous(source, into)
    if not rows:
        return
    _add_kernel[(rows, triton.cdiv(heads * head_dim, _BLOCK))](
        source,
        into,
        share.contiguous(),
        share if positions is None else positions,
        heads * head_dim,
        BLOCK=_BLOCK,
        HAS_POSITIONS=positions is not None,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_pair_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    total,
    first,
    second,
    positions,
    half_stride,
    width,
    BLOCK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_POSITIONS:
        target = tl.load(positions + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    source = row * width + column
    half = tl.program_id(2).to(tl.int64)  # 0: keys, 1: values
    if half == 0:
        share = tl.load(first + source, mask=is_column, other=0.0).to(tl.float32)
    else:
        share = tl.load(second + source, mask=is_column, other=0.0).to(tl.float32)
    at = total + half * half_stride + target * width + column
    added = tl.load(at, mask=is_column, other=0.0).to(tl.float32) + share
    tl.store(at, added.to(total.dtype.element_ty), mask=is_column)


def add_pair_rows(total: Tensor, positions: Tensor | None, first: Tensor, second: Tensor) -> None:
    """See `fused.add_pair_rows`."""
    rows, heads, head_dim = first.shape
    _check_contiguous(total[0], total[1])
    if not rows:
        return
    _add_pair_kernel[(rows, triton.cdiv(heads * head_dim, _BLOCK), 2)](
        total,
        first.contiguous(),
        second.contiguous(),
        first if positions is None else positions,
        total.stride(0),
        heads * head_dim,
        BLOCK=_BLOCK,
        HAS_POSITIONS=positions is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=(*_OF_LSE[:2], "rows"), do_not_specialize_on_alignment=("lse",))  # type: ignore[untyped-decorator]
def _take_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    first,
    second,
    third,
    lse,
    first_taken,
    second_taken,
    third_taken,
    lse_taken,
    positions,
    first_row,
    first_head,
    second_row,
    second_head,
    third_row,
    third_head,
    lse_row,
    lse_head,
    rows,
    heads,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(positions + row)
    head = tl.arange(0, HEADS_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    is_head = head < heads
    is_element = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    to = row * heads * HEAD_DIM + head[:, None] * HEAD_DIM + dim[None, :]
    values = tl.load(first + source * first_row + head[:, None] * first_head + dim[None, :], mask=is_element)
    tl.store(first_taken + to, values, mask=is_element)
    values = tl.load(second + source * second_row + head[:, None] * second_head + dim[None, :], mask=is_element)
    tl.store(second_taken + to, values, mask=is_element)
    values = tl.load(third + source * third_row + head[:, None] * third_head + dim[None, :], mask=is_element)
    tl.store(third_taken + to, values, mask=is_element)
    sums = tl.load(lse + source * lse_row + head * lse_head, mask=is_head)
    tl.store(lse_taken + head * rows + row, sums, mask=is_head)  # [H, n]


def take_rows(
    first: Tensor, second: Tensor, third: Tensor, lse: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fused.take_rows`."""
    rows, (heads, head_dim) = positions.shape[0], first.shape[1:]
    taken = [tensor.new_empty(rows, heads, head_dim) for tensor in (first, second, third)]
    # Heads first, as CUDA's backward kernels read it: `lse.t().contiguous()` is then no copy.
    lse_taken = lse.new_empty(heads, rows)
    assert all(tensor.stride(-1) == 1 for tensor in (first, second, third))
    if rows:
        _take_kernel[(rows,)](
            first,
            second,
            third,
            lse,
            *taken,
            lse_taken,
            positions,
            *(stride for tensor in (first, second, third, lse) for stride in tensor.stride()[:2]),
            rows,
            heads,
            HEAD_DIM=head_dim,
            HEADS_BLOCK=triton.next_power_of_2(heads),
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            num_warps=8,
        )
    return taken[0], taken[1], taken[2], lse_taken.t()


def _check_contiguous(*tensors: Tensor | None) -> None:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "rows must lie one after the other"
