"""PyTorch's attention operators of CUDA as they are documented, in plain products on the CPU.

`flash` and `cudnn` are registered with PyTorch's dispatcher for CPU tensors, so that the operators' own schemas check
every call. FlashAttention 3 and 4 stand as the packages that PyTorch's adapters import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fcp_cli.runtime.kernels import select
from fcp_cli.runtime.kernels.available import kernels_of
from fcp_cli.runtime.kernels.cudnn import CudnnOperators, aten_operators
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.layout import Segments, shard_layout

_NONE = torch.empty(0)
_Library: Any = torch.library.Library  # its methods are untyped


def _segments(cu_q: Tensor, cu_k: Tensor, causal: bool, left: int | None) -> Segments:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    lengths = [tuple(bounds.diff().tolist()) for bounds in (cu_q, cu_k)]
    window = None if left in (None, -1) else left + 1
    return Segments(lengths[0], lengths[1], causal=causal, window=window)


class FakeFlash:
    """`aten::_flash_attention_forward` and its backward: causal masks end at the last key, lse is [heads, rows]."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *rest: Any,
        scale: float, window_size_left: int | None = None, window_size_right: int | None = None, **others: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("flash forward")
        dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        segments = _segments(cu_q, cu_k, causal, window_size_left)
        assert (max_q, max_k) == (max(segments.q_lengths), max(segments.k_lengths))
        out, lse = DenseKernel().forward(q, k, v, segments, scale)
        return out, lse.t().contiguous(), torch.zeros(2, dtype=torch.uint64, device="cpu"), _NONE, _NONE

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
        *rest: Any, scale: float, window_size_left: int | None = None, window_size_right: int | None = None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("flash backward")
        causal = rest[3]
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and lse.dtype == torch.float32
        assert dout.is_contiguous() and out.is_contiguous()
        segments = _segments(cu_q, cu_k, causal, window_size_left)
        return DenseKernel().backward(dout, q, k, v, out, lse.t(), segments, scale)


class FakeCudnn:
    """cuDNN's attention: causal masks begin at the first key.

    Args:
        stats_dims: of the dense log-sum-exps; 3 before torch 2.9.
        most_head_dim: that has a plan.
        shares_heads: whether fewer key heads than query heads have a plan.
        packed_stats: layout of the packed form's log-sum-exps.
        shares_graphs: as under TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1: lengths of one power of two share a graph, which
            keeps the log-sum-exps' strides of the call that built it, up to torch 2.14.
    """

    def __init__(
        self,
        *,
        stats_dims: int = 4,
        most_head_dim: int = 128,
        shares_heads: bool = True,
        packed_stats: str = "rows, 1",
        shares_graphs: bool = False,
    ) -> None:
        self.stats_dims = stats_dims
        self.most_head_dim = most_head_dim
        self.shares_heads = shares_heads
        self.packed_stats = packed_stats
        self.shares_graphs = shares_graphs
        self._graphs: dict[tuple[Any, ...], tuple[int, ...]] = {}  # the backward's: key to strides of log-sum-exps
        self.calls: list[str] = []

    def _require_plan(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        head_dim = max(q.shape[-1], v.shape[-1])
        if head_dim > self.most_head_dim or head_dim % 8 or (q.shape[1] != k.shape[1] and not self.shares_heads):
            raise RuntimeError("cuDNN Frontend error: No valid execution plans built.\nmore lines")

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False,
        debug: bool = False, *, scale: float
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("dense forward")
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        assert q.dim() == k.dim() == v.dim() == 4 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert len(q) == len(k) == len(v) and k.shape[2] == v.shape[2]
        self._require_plan(q, k, v)
        assert q.shape[2] > 1 and k.shape[2] > 1, "one token has no plan"
        packed = [_packed(tensor) for tensor in (q, k, v)]
        queries, keys, values = packed
        out, lse = _top_left(queries, keys, values, _equal(q, k, causal), scale)
        stats = lse.view(len(q), q.shape[2], -1).transpose(1, 2)
        stats = stats if self.shares_graphs and _is_rows_first(q, k, v) else stats.contiguous()
        stats = stats if self.stats_dims == 3 else stats.unsqueeze(-1)
        shape = (len(q), q.shape[2], q.shape[1], v.shape[3])
        seed = torch.zeros((), dtype=torch.int64, device="cpu")
        return out.view(shape).transpose(1, 2), stats, _NONE, _NONE, q.shape[2], k.shape[2], seed, seed, _NONE

    def dense_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, dropout: float,
        causal: bool, *, scale: float
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("dense backward")
        assert (bias, cu_q, cu_k, dropout) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert out.stride() == dout.stride(), "before cuDNN 9.5.1 both must have one layout"
        expected = (*q.shape[:3], 1) if self.stats_dims == 4 else q.shape[:3]
        assert lse.shape == expected
        if self.shares_graphs and _is_rows_first(q, k, v, out):
            lse = self._read_by_graph(lse, (q.shape[:2], *(_power_of_two(x.shape[2]) for x in (q, k)), causal))
        else:
            assert lse.is_contiguous(), "cuDNN reads no other order here"
        douts, queries, keys, values, outs = (_packed(tensor) for tensor in (dout, q, k, v, out))
        rows = lse.reshape(q.shape[:3]).transpose(1, 2).flatten(0, 1)
        grads = _top_left_backward(douts, queries, keys, values, outs, rows, _equal(q, k, causal), scale)
        return tuple(
            grad.view(len(like), like.shape[2], like.shape[1], -1).transpose(1, 2)
            for grad, like in zip(grads, (q, k, v), strict=True)
        )

    def _read_by_graph(self, lse: Tensor, key: tuple[Any, ...]) -> Tensor:
        """Return the log-sum-exps [batch, heads, rows, 1] that a graph of this key reads in the place of `lse`."""
        strides = self._graphs.setdefault(key, lse.stride())
        memory = lse.as_strided((lse.numel(),), (1,)).repeat(3)  # what lies behind them is read, too
        offsets = [sequence * lse.shape[2] * lse.stride(2) for sequence in range(len(lse))]
        return torch.cat([memory.as_strided((1, *lse.shape[1:]), strides, offset) for offset in offsets])

    def packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        *rest: Any, scale: float
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("packed forward")
        with_lse, dropout, causal, debug = rest
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        self._require_plan(q, k, v)
        out, lse = _top_left(q, k, v, _segments(cu_q, cu_k, causal, None), scale)
        stats = {"rows, 1": lse.unsqueeze(-1), "rows": lse, "heads": lse.t()}[self.packed_stats].contiguous()
        return out, stats, cu_q, cu_k, max_q, max_k, _NONE, _NONE, _NONE

    def packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Tensor | None, cu_q: Tensor, cu_k: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("packed backward")
        tokens, heads = q.shape[:2]
        shapes = {"rows, 1": (tokens, heads, 1), "rows": (tokens, heads), "heads": (heads, tokens)}
        assert lse.shape == shapes[self.packed_stats] and lse.is_contiguous()
        rows = lse.t() if self.packed_stats == "heads" else lse.view(tokens, heads)
        return _top_left_backward(dout, q, k, v, out, rows, _segments(cu_q, cu_k, rest[3], None), scale)

    def operators(self, *, packs: bool) -> CudnnOperators:
        """Return the operators of a release: the dense ones of PyTorch's dispatcher, packed ones that keep graphs."""
        dense = aten_operators()
        assert dense is not None
        if not packs:
            return dense
        packed_forward: Any = lambda *args, **options: self.packed_forward(*args, **options)  # noqa: E731
        packed_forward._schema = SimpleNamespace(arguments=[SimpleNamespace(name="seqused_k")])
        return dense._replace(packed_forward=packed_forward, packed_backward=self.packed_backward)


def _packed(tensor: Tensor) -> Tensor:
    """[batch, heads, rows, size] -> [batch * rows, heads, size]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _is_rows_first(*tensors: Tensor) -> bool:
    """Whether tensors [batch, heads, rows, size] lie as [batch, rows, heads, size]."""
    return all(tensor.transpose(1, 2).is_contiguous() for tensor in tensors)


def _power_of_two(length: int) -> int:
    """The least power of two that holds a length."""
    return 1 << (length - 1).bit_length()


def _equal(q: Tensor, k: Tensor, causal: bool) -> Segments:
    return Segments((q.shape[2],) * len(q), (k.shape[2],) * len(k), causal=causal)


def _top_left(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    keys, values = _seen(segments, k, v)
    return DenseKernel().forward(q, keys, values, _square(segments), scale)


def _top_left_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, ...]:
    assert _square(segments).k_lengths == segments.k_lengths, "only forward is imitated for other shapes"
    return DenseKernel().backward(dout, q, k, v, out, lse, segments, scale)


def _square(segments: Segments) -> Segments:
    """A mask that begins at the first key leaves keys beyond the last query unseen."""
    if not segments.causal:
        return segments
    return Segments(segments.q_lengths, segments.q_lengths, causal=True)


def _seen(segments: Segments, *tensors: Tensor) -> Any:
    if not segments.causal:
        return list(tensors)
    pairs = list(zip(segments.q_lengths, segments.k_lengths, strict=True))
    cut = [torch.split_with_sizes(tensor, list(segments.k_lengths)) for tensor in tensors]
    return [torch.cat([part[:rows] for part, (rows, _) in zip(parts, pairs, strict=True)]) for parts in cut]


@contextmanager
def registered(flash: FakeFlash | None, cudnn: FakeCudnn | None) -> Iterator[None]:
    """Let PyTorch's operators run the fakes for CPU tensors."""
    library = _Library("aten", "IMPL", "CPU")
    if flash is not None:
        library.impl("_flash_attention_forward", flash.forward, "CPU")
        library.impl("_flash_attention_backward", flash.backward, "CPU")
    if cudnn is not None:
        library.impl("_scaled_dot_product_cudnn_attention", cudnn.dense_forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn.dense_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def without_a_card(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """A CUDA device of fake tensors: a CUDA build's own schemas and meta kernels check every call, and nothing runs."""
    compared = select._error

    def error(*args: Any) -> str | None:
        try:
            return compared(*args)
        except fake_tensor.DataDependentOutputException:  # the end of a test call, where numbers are compared
            return None

    library = _Library("aten", "IMPL", "Meta")
    for name, shapes in (("_cudnn_attention_forward", _packed_shapes), ("_cudnn_attention_backward", _grad_shapes)):
        # PyTorch 2.14 has no meta kernels of the packed form; the schema checks its calls all the same.
        if hasattr(torch.ops.aten, name) and not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "Meta"
        ):
            library.impl(name, shapes, "Meta")
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "current_stream", lambda *_: "the current stream")
        patch.setattr(fake_tensor, "init_gpu_context", lambda _: None)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)
        patch.setattr(Tensor, "pin_memory", lambda tensor, *_: tensor)
        patch.setattr(select, "_error", error)
        kernels_of.cache_clear()
        shard_layout.cache_clear()  # layouts keep the tensors that were made for them
        yield
    library._destroy()
    kernels_of.cache_clear()
    shard_layout.cache_clear()


def _packed_shapes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> tuple[Any, ...]:
    cu_q, cu_k, max_q, max_k, *_ = rest
    lse = q.new_empty((*q.shape[:2], 1), dtype=torch.float32)
    seed = q.new_empty((), dtype=torch.int64)
    return q.new_empty(*q.shape[:2], v.shape[2]), lse, cu_q, cu_k, max_q, max_k, seed, seed, q.new_empty(0)


def _grad_shapes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# As in `TORCH_LIBRARY` of flash-attention's hopper/flash_api.cpp; its backward returns five more tensors.
_FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
    "Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> ()"
)


FA3_MARGINS: list[int] = []
"""`sm_margin` of each call of FlashAttention 3."""


def _fa3_given(name: str, args: tuple[Any, ...]) -> tuple[dict[str, Any], Segments]:
    """Return an operator's arguments by name, and its segments; the dispatcher drops defaults at the end."""
    arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
    given = {one.name: args[at] if at < len(args) else one.default_value for at, one in enumerate(arguments)}
    segments = _segments(given["cu_seqlens_q"], given["cu_seqlens_k"], given["is_causal"], given["window_size_left"])
    longest = max(segments.q_lengths), max(segments.k_lengths)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == longest
    FA3_MARGINS.append(given["sm_margin"])
    return given, segments


def _fa3_forward(*args: Any) -> tuple[Tensor, ...]:
    given, segments = _fa3_given("fwd", args)
    out, lse = DenseKernel().forward(given["q"], given["k"], given["v"], segments, given["softmax_scale"])
    return out, lse.t().contiguous(), torch.empty(0), torch.empty(0)


def _fa3_backward(*args: Any) -> None:
    given, segments = _fa3_given("bwd", args)
    dout, q, k, v, out, lse = (given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
    grads = DenseKernel().backward(dout, q, k, v, out, lse.t(), segments, given["softmax_scale"])
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        given[name].copy_(grad)


def _of_may_2025(schema: str) -> str:
    """Return a schema whose arguments before the window have no defaults."""
    head, window, tail = schema.partition("int window_size_left")
    return head.replace("=None", "").replace("=False", "") + window + tail


@cache
def _fa3_library(namespace: str) -> Any:
    library = _Library(namespace, "DEF")
    for schema in (_FA3_FORWARD, _FA3_BACKWARD):
        library.define(schema if namespace == "flash_attn_3" else _of_may_2025(schema))
    library.impl("fwd", _fa3_forward, "CPU")
    library.impl("bwd", _fa3_backward, "CPU")
    return library


def install_fa3(monkeypatch: pytest.MonkeyPatch, *, first_release: bool = False) -> None:
    """Install a package of FlashAttention 3, whose operators PyTorch's adapter calls."""
    _fa3_library("flash_attn_3")
    if first_release:
        _fa3_library("flash_attn_3_of_may_2025")
        monkeypatch.setattr(torch.ops, "flash_attn_3", torch.ops.flash_attn_3_of_may_2025)
    _install(monkeypatch, "flash_attn_interface")
    from torch.nn.attention import _fa3

    monkeypatch.setattr(_fa3, "_fa3_common_support_error", lambda *_: None)  # it asks for CUDA tensors


def install_fa4(monkeypatch: pytest.MonkeyPatch, *, head_dims: tuple[int, ...] = (64, 96, 128)) -> None:
    """Install a package of FlashAttention 4, whose functions PyTorch's adapter calls."""

    # As in flash_attn/cute/interface.py, less what nobody passes.
    def forward(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        seqused_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0, page_table: Tensor | None = None,
        softmax_scale: float = 0.0, causal: bool = False, window_size_left: int | None = None,
        window_size_right: int | None = None, num_splits: int = 1, return_lse: bool = False, out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert return_lse and num_splits == 1 and out is None
        assert q.shape[-1] in head_dims, f"head_dim {q.shape[-1]} is not supported"
        segments = _segments(cu_seqlens_q, cu_seqlens_k, causal, window_size_left)
        assert (max_seqlen_q, max_seqlen_k) == (max(segments.q_lengths), max(segments.k_lengths))
        result, lse = DenseKernel().forward(q, k, v, segments, softmax_scale)
        return result, lse.t()

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float = 0.0,
        causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
        window_size_right: int | None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        segments = _segments(cu_seqlens_q, cu_seqlens_k, causal, window_size_left)
        return DenseKernel().backward(dout, q, k, v, out, lse.t(), segments, softmax_scale)

    for name in ("flash_attn", "flash_attn.cute"):
        _install(monkeypatch, name).__path__ = []
    module: Any = _install(monkeypatch, "flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    from torch.nn.attention import _fa4

    _fa4._fa4_import_module.cache_clear()
    monkeypatch.setattr(_fa4, "_fa4_common_support_error", lambda *_, **__: None)
    monkeypatch.setattr(_fa4, "_get_device_major", lambda device: 10)


def _install(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return module
