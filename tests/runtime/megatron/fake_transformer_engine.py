"""Stands in for Transformer Engine, which needs a GPU: Megatron's own wrapper of it, over a fake of what is wrapped.

The fake's attention asserts what Transformer Engine 2.20 asserts, knows no more of a ring than it is told (lengths, a
process group), and computes with fcp's ring over that group.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.extensions import transformer_engine as without_engine
from torch import Tensor, nn
from torch.nn import functional as F

from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.transport import ProcessTransport


class DotProductAttention(nn.Module):
    """transformer_engine.pytorch.DotProductAttention, of which Megatron's TEDotProductAttention is a subclass."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.cp_group: Any = None
        self.cp_global_ranks: Any = None
        self.cp_stream: Any = None
        self.cp_comm_type = "all_gather"
        self._scale = softmax_scale or kv_channels**-0.5

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        if qkv_format == "sbhd":
            assert self.cp_group is None, "a group of another call"
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query_layer, key_layer, value_layer))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        assert qkv_format == "thd" and attn_mask_type == "padding_causal"
        assert query_layer.dim() == key_layer.dim() == value_layer.dim() == 3
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None and cu_seqlens_q.dtype == torch.int32
        assert not pad_between_seqs and cu_seqlens_q_padded is cu_seqlens_kv_padded is None, (
            "padding between sequences is for fewer kernels"
        )
        lengths = tuple(cu_seqlens_q.diff().tolist())
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        ring = self._ring(lengths)
        assert query_layer.shape[0] == ring.tokens
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_layer, key_layer, value_layer))
        out = attention(q, k, v, ring=ring, scale=self._scale)
        return out[0].transpose(0, 1).flatten(1)

    def _ring(self, lengths: tuple[int, ...]) -> Ring:
        if self.cp_group is None:
            return Ring(layout=shard_layout(lengths, 1))
        ranks = tuple(dist.get_process_group_ranks(self.cp_group))
        assert self.cp_comm_type == "p2p" and self.cp_stream is not None
        assert list(ranks) == self.cp_global_ranks
        # It sends one by one otherwise, for which NCCL makes a communicator per pair of ranks within the step.
        assert int(os.getenv("NVTE_BATCH_MHA_P2P_COMM", "0"))
        assert all(length % (2 * len(ranks)) == 0 for length in lengths), lengths
        return Ring(
            layout=shard_layout(lengths, len(ranks)),
            index=ranks.index(dist.get_rank()),
            ranks=ranks,
            transport=ProcessTransport(self.cp_group, torch.device("cpu")),
        )


_PARTS = ("distributed", "fp8", "ops", "router")


class _Module(ModuleType):
    """Whatever Megatron imports from it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def _fakes() -> Mapping[str, ModuleType]:
    engine: Any = _Module("transformer_engine")
    found = {engine.__name__: engine}
    for name in ("common", "common.recipe", "pytorch", *(f"pytorch.{part}" for part in _PARTS)):
        path = f"{engine.__name__}.{name}"
        parent, _, last = path.rpartition(".")
        found[path] = _Module(path)
        setattr(found[parent], last, found[path])
    engine.__version__ = "2.20.0"
    engine.pytorch.DotProductAttention = DotProductAttention
    return found


def megatron_wrapper() -> Any:
    """Megatron's TEDotProductAttention, from its own source, over the fake."""
    spec = importlib.util.spec_from_file_location("megatron_over_fake_engine", without_engine.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {**_fakes(), spec.name: module}):  # itself: dataclasses look their module up
        utils.get_te_version()  # which Megatron remembers
        spec.loader.exec_module(module)
    return module.TEDotProductAttention
