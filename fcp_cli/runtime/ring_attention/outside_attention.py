"""Attention over the whole batch that it is given, where no plan is followed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.runtime.ring_attention.group_member import AttentionSpec


def attention_outside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Do what `ring.attention` does, for q [B, H, tokens, D] and k and v [B, G, tokens, D] of whole sequences.

    Windows and sinks are given to PyTorch's attention as a mask, whose size is the square of the tokens.
    """
    scale, window, softcap = spec
    if window is None and sinks is None and softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    tokens = q.shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril_()
    if window is not None:
        seen.triu_(1 - window)
    mask = torch.zeros(tokens, tokens, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
    if softcap is not None:
        return _capped(q, k, v, mask, scale, softcap, sinks)
    if sinks is not None:  # a key of zeros, whose score is the sink
        k, v = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
        column = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        mask = torch.cat((mask.expand(len(sinks), -1, -1), column), dim=-1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend with scores that have a soft cap, as plain matrix products."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights @ v
