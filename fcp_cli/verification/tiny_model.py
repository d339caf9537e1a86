"""A small language model with everything that a plan could break: grouped-query attention, positions, several layers.

D = model width, H = query heads, G = key/value heads, T = tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.cost.recipe import Recompute
from fcp_cli.runtime.recompute import recomputed
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.util.masks import ChunkPairs, Mask

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Ring | None], Tensor]
"""Causal attention over q [1, H, T, head_dim], k and v [1, G, T, head_dim], optionally on a ring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig:
    """Model sizes and recomputation.

    Attributes:
        value_dim: head size of values; 0: that of queries and keys.
        single_kv_head: whether the last layer has one key/value head.
    """

    vocab_size: int = 61
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    value_dim: int = 0
    single_kv_head: bool = False
    layers: int = 2
    recompute: Recompute = "none"


def ring_attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None) -> Tensor:
    return attention(q, k, v, ring=ring)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring | None) -> Tensor:
    """Run PyTorch's attention over an entire sequence."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MaskedAttention:
    """PyTorch's attention over an entire sequence at a time, with the mask as a dense matrix."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None

    def begin(self, mask: Mask, tokens: int) -> None:
        """Set the mask of the next sequence."""
        self._seen = None if mask.is_causal else _seen(mask, tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring | None) -> Tensor:
        if self._seen is None:
            return plain_attend(q, k, v, ring)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self._seen, enable_gqa=True)


def _seen(mask: Mask, tokens: int) -> Tensor:
    """Return the allowed pairs of a mask, [queries, keys], from its definition rather than ring chunks."""
    queries, keys = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    if isinstance(mask, ChunkPairs):
        half, sizes = tokens // 2, torch.tensor(mask.sizes)
        chunk = torch.repeat_interleave(torch.arange(len(sizes)), sizes).repeat(2)
        q_chunk, k_chunk, is_noisy = chunk[:, None], chunk[None, :], queries >= half
        of_clean = torch.where(is_noisy, k_chunk < q_chunk, k_chunk <= q_chunk)
        return torch.where(keys >= half, is_noisy & (k_chunk == q_chunk), of_clean)
    seen = keys <= queries
    for start, stop in mask.seen_both_ways(tokens):
        seen[start:stop, start:stop] = True
    return seen


class TinyLanguageModel(nn.Module):
    """A language model: embedding, `layers` pre-norm blocks, untied output. Equal seeds give equal weights."""

    def __init__(
        self, config: TinyConfig, attend: Attend, *, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        kv_heads = [config.kv_heads] * (config.layers - config.single_kv_head) + [1] * config.single_kv_head
        self.blocks = nn.ModuleList(_Block(config, attend, number) for number in kv_heads)
        self.norm = nn.RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        self.to(dtype)
        # Drawn in fp64 regardless of `dtype`, so that weights of different types agree up to rounding.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)

    def forward(self, input_ids: Tensor, position_ids: Tensor, ring: Ring | None = None) -> Tensor:
        """Return the logits [1, T, vocabulary] of input_ids, position_ids [1, T]."""
        logits: Tensor = self.output(self.hidden(input_ids, position_ids, ring))
        return logits

    def hidden(self, input_ids: Tensor, position_ids: Tensor, ring: Ring | None = None) -> Tensor:
        """Return the input of the output layer, [1, T, D]."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            if self.recompute in ("none", "activation"):  # blocks implement "activation" themselves
                hidden = block(hidden, position_ids, ring)
            else:
                keeps = {
                    "keeps_attention": self.recompute == "selective",
                    "keeps_products": self.recompute == "elementwise",
                }
                hidden = recomputed(block, hidden, position_ids, ring, **keeps)
        normed: Tensor = self.norm(hidden)
        return normed


class _Block(nn.Module):
    def __init__(self, config: TinyConfig, attend: Attend, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.value_dim = config.value_dim or self.head_dim
        self.attend = attend
        self.recomputes_activation = config.recompute == "activation"
        self.attention_norm = nn.RMSNorm(config.width)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.width, kv_heads * self.value_dim, bias=False)
        self.attention_output = nn.Linear(config.heads * self.value_dim, config.width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(config.width),
            nn.Linear(config.width, 2 * config.width, bias=False),
            nn.SiLU(),
            nn.Linear(2 * config.width, config.width, bias=False),
        )

    def forward(self, hidden: Tensor, position_ids: Tensor, ring: Ring | None) -> Tensor:
        normed = self.attention_norm(hidden)
        q, k, v = (
            project(normed).unflatten(-1, (-1, size)).transpose(1, 2)
            for project, size in ((self.query, self.head_dim), (self.key, self.head_dim), (self.value, self.value_dim))
        )
        attended = self.attend(_rotate(q, position_ids), _rotate(k, position_ids), v, ring)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).flatten(2))
        run = partial(recomputed, self.feed_forward, keeps_products=True)
        out: Tensor = hidden + (run if self.recomputes_activation else self.feed_forward)(hidden)
        return out


def _rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """Apply the rotary position embedding (Su et al., RoFormer) to x [1, heads, T, head_dim]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = position_ids[:, None, :, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)
