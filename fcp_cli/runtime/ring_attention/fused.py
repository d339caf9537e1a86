"""Operators that make one pass over memory instead of torch's several: on CUDA, by Triton.

They are registered with torch under `fcp::`, so that profiles name them, and meta tensors can count them where neither
triton nor a GPU is there. `fused_rows` says whether a device has them; elsewhere `rows.py` uses torch's own.
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
    """Return whether the operators run on a kind of device: on CUDA with triton, unless FCP_TRITON=0 forbids it."""
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
    """Merge partial results, as `rows.merge`.

    Args:
        source, into, also: [T, H, D] contiguous.
        lse: [T, H] fp32, with any strides.
        positions: [n] int64, the rows that take part, each once; None: the first n.
        part: [n, H, D]
        part_lse: [n, H] fp32, with any strides.
    """
    torch.ops.fcp.merge_rows(source, into, also, lse, positions, part, part_lse)


def add_rows(source: Tensor, into: Tensor, also: Tensor | None, positions: Tensor | None, share: Tensor) -> None:
    """Add rows, as `rows.add`, in fp32; arguments as in `merge_rows`, `share` [n, H, D]."""
    torch.ops.fcp.add_rows(source, into, also, positions, share)


def add_pair_rows(total: Tensor, positions: Tensor | None, first: Tensor, second: Tensor) -> None:
    """Add two shares, as `rows.add_pair`, in fp32: `total` [2, T, G, D] with contiguous halves, shares [n, G, D]."""
    torch.ops.fcp.add_pair_rows(total, positions, first, second)


def take_rows(
    first: Tensor, second: Tensor, third: Tensor, lse: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather rows of three tensors [T, H, D] and of lse [T, H], whose rows come out as a view of [H, n]."""
    taken: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.fcp.take_rows(first, second, third, lse, positions)
    return taken


def _launch(name: str) -> Any:
    """Return the CUDA implementation of an operator; its first call imports triton."""

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
    """Define the operators, for CUDA and for meta tensors; they last as long as the library that is returned."""
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _launch(name), "CUDA")
        library.impl(name, _taken_shapes if name == "take_rows" else lambda *_: None, "Meta")
    return library


_library = _define(torch.library.Library("fcp", "DEF"))  # type: ignore[no-untyped-call]
