"""Fused Triton operators for CUDA: one pass over memory instead of torch's several.

They are registered under `fcp::`, so that profiles name them and meta tensors can trace them without triton or a GPU.
`fused_rows` tells whether a device has them; elsewhere `rows.py` falls back to torch operators.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_VARIABLE = "FCP_TRITON"

# `(a!)` marks a tensor that is written to, so that torch neither reorders nor drops the call.
_SCHEMAS = {
    "merge_rows": "(Tensor source, Tensor(a!) into, Tensor(b!)? also, Tensor(c!) lse, Tensor? positions, Tensor part, "
    "Tensor part_lse) -> ()",
    "add_rows": "(Tensor source, Tensor(a!) into, Tensor(b!)? also, Tensor? positions, Tensor share) -> ()",
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


def add_rows(source: Tensor, into: Tensor, also: Tensor | None, positions: Tensor | None, share: Tensor) -> None:
    """Add `share` [n, H, D] to rows in fp32; see `rows.add` and, for the other arguments, `merge_rows`."""
    torch.ops.fcp.add_rows(source, into, also, positions, share)


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
        return getattr(importlib.import_module("fcp_cli.runtime.ring_attention.triton_rows"), name)(*args)

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
