"""Attention on CUDA by cuDNN, through PyTorch's operators.

There are two forms. The dense one, `aten::_scaled_dot_product_cudnn_attention`, takes sequences of equal length as a
batch, and is what PyTorch's own context parallelism uses. It returns log-sum-exps [batch, heads, rows, 1] ([batch,
heads, rows] before torch 2.9), and takes a row's final out and log-sum-exp in backward. The packed one,
`aten::_cudnn_attention_forward` with cumulative lengths, takes all sequences at once. It is only used if its schema has
`seqused_k`: earlier releases build a graph in every call (42 ms, pytorch#191576) and size the backward's buffers by the
head size (illegal addresses, pytorch#186142).

PyTorch builds a graph for each new shape, once in each thread for forward and for backward, and never frees one
(`MHAGraphCache`), so their number is limited here. Under TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 (torch 2.9 on,
pytorch#155958) calls whose tensors lie as [batch, rows, heads, size] run padded to the next powers of two, by which
their lengths share graphs up to torch 2.13; later keys hold the exact shape of the output, too. A shared graph keeps
the strides of the log-sum-exps that it was built with: their memory order must be that of forward, [batch, rows,
heads], whose strides do not depend on the length.

Causal masks are aligned at the first query and key here, so causal calls need as many queries as keys.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fcp_cli.cost.kernels import LEAST_TOKENS_OF_SHARED_GRAPHS, LEAST_UNMEASURED_TOKENS
from fcp_cli.cost.recipe import KernelName
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.cuda import bounds_of
from fcp_cli.runtime.layout import Segments

MOST_BATCHES: Final = 8  # calls and graphs per pack
MOST_GRAPHS: Final = 512  # of a process: 21 s at 42 ms each
_MOST_WASTE: Final = 4  # the packed backward allocates memory for each sequence as for the longest one
_SHARING: Final = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


class CudnnOperators(NamedTuple):
    """PyTorch's operators: of the dense form, and of the packed one."""

    dense_forward: Callable[..., Any]
    dense_backward: Callable[..., Any]
    packed_forward: Callable[..., Any] | None
    packed_backward: Callable[..., Any] | None


Shape: TypeAlias = tuple[int, ...]


class _EqualSequences(NamedTuple):
    """Consecutive sequences of one shape: their number, and the numbers of queries and keys of each."""

    number: int
    rows: int
    keys: int


def aten_operators() -> CudnnOperators | None:
    """Return PyTorch's operators, or None if this release lacks the dense ones."""
    dense, dense_backward, packed, packed_backward = (
        getattr(getattr(torch.ops.aten, name, None), "default", None)
        for name in (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_cudnn_attention_forward",
            "_cudnn_attention_backward",
        )
    )
    if dense is None or dense_backward is None:
        return None
    return CudnnOperators(dense, dense_backward, packed, packed_backward)


def packs_soundly(operators: CudnnOperators) -> bool:
    """Return whether this release's packed form caches graphs and sizes buffers correctly; see the module docstring."""
    packed: Any = operators.packed_forward
    if packed is None or operators.packed_backward is None:
        return False
    return any(argument.name == "seqused_k" for argument in packed._schema.arguments)


def share_graphs(operators: CudnnOperators) -> None:
    """Let lengths share graphs, unless the user has decided; before the first call, which reads the variable."""
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.9" and not packs_soundly(operators):
        os.environ.setdefault(_SHARING, "1")


def least_unmeasured_tokens() -> int:
    """Return the tokens of a causal sequence from which cuDNN is used without a measurement."""
    operators = aten_operators()
    shared = os.environ.get(_SHARING) == "1" and operators is not None and not packs_soundly(operators)
    return LEAST_TOKENS_OF_SHARED_GRAPHS if shared else LEAST_UNMEASURED_TOKENS


class CudnnKernel:
    """Attention in bf16 and fp16; head sizes depend on device and release. It never synchronizes with the device.

    Args:
        operators: PyTorch's operators.
        packs: whether sequences of several lengths run as one call; else one call per batch of equal length.
    """

    name: KernelName = "cudnn"
    packed = True

    def __init__(self, operators: CudnnOperators, *, packs: bool = False) -> None:
        self._operators = operators
        self._packs = packs
        self._stats_dims = 4  # of the dense form's log-sum-exps, as returned by forward
        self._shares_graphs = False  # whether forward returns them in the order [batch, rows, heads]
        self._packed_stats: str | None = None  # layout of the packed form's log-sum-exps, as returned by forward
        self._graphs: set[tuple[Hashable, ...]] = set()  # thread, direction, heads and shape of each
        self._shapes: set[Shape] = set()  # of all graphs

    def refusal(self, segments: Segments) -> str | None:
        """Return the reason why the kernel cannot run a call, or None."""
        if segments.window is not None:
            return "no windows"
        if segments.causal and segments.q_lengths != segments.k_lengths:
            return "causal masks are aligned at the first key"
        if min(segments.q_lengths) < 2 or min(segments.k_lengths) < 2:
            return "no sequences of one token"  # pytorch#138531
        if len(_batches(segments)) > MOST_BATCHES and not self._packs_cheaply(segments):
            return f"more than {MOST_BATCHES} batches of one shape"
        if len(self._graphs) >= MOST_GRAPHS and not self._shapes.issuperset(self._shapes_of(segments)):
            return f"a new shape, after {MOST_GRAPHS} graphs"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        batches = _batches(segments)
        self._count_graphs("forward", q, k, segments)
        if len(batches) > 1 and self._packs_cheaply(segments):
            return self._packed_forward(q, k, v, segments, scale)
        results = [
            self._dense_forward(*parts, causal=segments.causal, scale=scale) for parts in _cut(batches, (q,), (k, v))
        ]
        return _joined([out for out, _ in results]), _joined([lse for _, lse in results])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        batches = _batches(segments)
        self._count_graphs("backward", q, k, segments)
        dout, out = dout.contiguous(), out.contiguous()
        if len(batches) > 1 and self._packs_cheaply(segments):
            return self._packed_backward(dout, q, k, v, out, lse, segments, scale)
        pieces = zip(
            _cut(batches, (dout, q, out), (k, v)),
            torch.split_with_sizes(lse, [batch.number * batch.rows for batch in batches]),
            batches,
            strict=True,
        )
        results = [self._dense_backward(parts, rows, batch, segments, scale) for parts, rows, batch in pieces]
        dq, dk, dv = (_joined(list(grads)) for grads in zip(*results, strict=True))
        return dq, dk, dv

    def _count_graphs(self, direction: str, q: Tensor, k: Tensor, segments: Segments) -> None:
        """Note a call's graphs. Each thread has its own, and autograd's also runs forward of recomputed layers."""
        shapes = self._shapes_of(segments)
        self._shapes |= shapes
        heads = (*q.shape[1:], k.shape[1])
        self._graphs |= {(threading.get_ident(), direction, heads, shape) for shape in shapes}

    def _shapes_of(self, segments: Segments) -> set[Shape]:
        batches = _batches(segments)
        if len(batches) > 1 and self._packs_cheaply(segments):  # its graphs fit one number of tokens
            sides = (segments.q_lengths, segments.k_lengths)
            return {(len(sides[0]), *(size(side) for side in sides for size in (sum, max)), segments.causal)}
        exact = not self._shares_graphs or packs_soundly(self._operators)
        return {
            (one.number, *((n if exact else 1 << (n - 1).bit_length()) for n in one[1:]), segments.causal)
            for one in batches
        }

    def _packs_cheaply(self, segments: Segments) -> bool:
        if not self._packs:
            return False
        sides = (segments.q_lengths, segments.k_lengths)
        return all(len(lengths) * max(lengths) <= _MOST_WASTE * sum(lengths) for lengths in sides)

    def _dense_forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attend in [batch, heads, rows, size]; return results with rows first."""
        out, stats, *_ = self._operators.dense_forward(q, k, v, None, True, 0.0, causal, False, scale=scale)
        if tuple(stats.shape) not in (q.shape[:3], (*q.shape[:3], 1)):
            raise RunError(
                f"cuDNN's attention of torch {torch.__version__} gives log-sum-exp of shape {tuple(stats.shape)}, "
                f"expected {tuple(q.shape[:3])}: use --attention-kernel fa2"
            )
        self._stats_dims = stats.dim()
        if q.shape[1] > 1 and _lie_rows_first(q, k, v):
            self._shares_graphs = stats.stride(1) < stats.stride(2)
        return _rows_first(out), stats.reshape(q.shape[:3]).transpose(1, 2).flatten(0, 1)

    def _dense_backward(
        self, parts: list[Tensor], lse: Tensor, batch: _EqualSequences, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, k, v = parts
        if self._shares_graphs and _lie_rows_first(q, k, v, out):
            stats = _batched(lse.contiguous(), batch.number, batch.rows)
        else:
            stats = _batched(lse, batch.number, batch.rows).contiguous()
        if self._stats_dims == 4:
            stats = stats.unsqueeze(-1)
        seed = _unused_seed(segments, q)
        # No bias and no cumulative lengths: None is an undefined tensor, as passed by autograd.
        grads = self._operators.dense_backward(
            dout, q, k, v, out, stats, seed, seed, None, None, None, batch.rows, batch.keys, 0.0, segments.causal,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = map(_rows_first, grads)
        return dq, dk, dv

    def _packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert self._operators.packed_forward is not None
        bounds = bounds_of(segments, q.device)
        out, stats, *_ = self._operators.packed_forward(
            q, k, v, None, bounds.q, bounds.k, bounds.longest_q, bounds.longest_k, True, 0.0, segments.causal, False,
            scale=scale,
        )  # fmt: skip
        tokens, heads = q.shape[:2]
        layouts = {(tokens, heads, 1): "rows, 1", (tokens, heads): "rows", (heads, tokens): "heads"}
        layout = layouts.get(tuple(stats.shape))
        if layout is None or (tokens == heads and stats.dim() == 2 and self._packed_stats is None):
            raise RunError(
                f"cuDNN's packed attention of torch {torch.__version__} gives log-sum-exp of shape "
                f"{tuple(stats.shape)} for {tokens} tokens and {heads} heads: use --attention-kernel fa2"
            )
        if tokens != heads or self._packed_stats is None:
            self._packed_stats = layout
        return out, stats.t() if self._packed_stats == "heads" else stats.view(tokens, heads)

    def _packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._operators.packed_backward is not None
        bounds, seed = bounds_of(segments, q.device), _unused_seed(segments, q)
        stats = lse.t().contiguous() if self._packed_stats == "heads" else lse.contiguous()
        if self._packed_stats == "rows, 1":
            stats = stats.unsqueeze(-1)
        dq, dk, dv = self._operators.packed_backward(
            dout, q, k, v, out, stats, seed, seed, None, bounds.q, bounds.k, bounds.longest_q, bounds.longest_k, 0.0,
            segments.causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


def _batches(segments: Segments) -> list[_EqualSequences]:
    """Group consecutive sequences of one shape."""
    return segments.derived("batches", lambda: _make_batches(segments))


def _make_batches(segments: Segments) -> list[_EqualSequences]:
    shapes = zip(segments.q_lengths, segments.k_lengths, strict=True)
    return [_EqualSequences(len(list(run)), rows, keys) for (rows, keys), run in groupby(shapes)]


def _cut(
    batches: list[_EqualSequences], of_rows: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> list[list[Tensor]]:
    """Return views [count, heads, length, size] of packed tensors per batch: query-side, then key-side tensors."""
    row_sizes = [batch.number * batch.rows for batch in batches]
    key_sizes = [batch.number * batch.keys for batch in batches]
    rows = [torch.split_with_sizes(tensor, row_sizes) for tensor in of_rows]
    keys = [torch.split_with_sizes(tensor, key_sizes) for tensor in of_keys]
    return [
        [
            *(_batched(parts[i], batch.number, batch.rows) for parts in rows),
            *(_batched(parts[i], batch.number, batch.keys) for parts in keys),
        ]
        for i, batch in enumerate(batches)
    ]


def _batched(packed: Tensor, count: int, length: int) -> Tensor:
    """View [count * length, heads, ...] as [count, heads, length, ...]."""
    return packed.view(count, length, *packed.shape[1:]).transpose(1, 2)


def _lie_rows_first(*tensors: Tensor) -> bool:
    """Return whether all tensors [batch, heads, rows, size] lie in memory as [batch, rows, heads, size]."""
    return all(tensor.transpose(1, 2).is_contiguous() for tensor in tensors)


def _rows_first(tensor: Tensor) -> Tensor:
    """Reshape [batch, heads, rows, size] to [batch * rows, heads, size]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unused_seed(segments: Segments, like: Tensor) -> Tensor:
    """Return a seed: a required argument that is never read without dropout."""
    return segments.derived(("seed", like.device), lambda: torch.zeros((), dtype=torch.int64, device=like.device))
