"""Packed causal attention on one device, written as plainly as possible, and packs that are hard to cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fcp_cli.util.masks import CAUSAL, Mask
from tests.masks import Masked, seen

# Lengths of 1, shorter than 2 * degree, prime, not divisible by anything, and one that dominates.
PACKS: list[tuple[int, ...]] = [(1,), (1, 2, 3), (5, 7, 13, 37, 101), (64,), (100, 1, 4), (3, 3, 3, 3, 3, 3)]
HEADS = [(4, 4), (8, 2), (3, 1)]


def can_share(heads: tuple[int, int], ranks: int) -> bool:
    """Whether so many ranks can share these query and key/value heads, the latter replicated where there are fewer."""
    return not heads[0] % ranks and (not heads[1] % ranks or not ranks % heads[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Inputs [tokens, heads, head_dim] of one pack, what comes out of them, and the gradients."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    masks: tuple[Mask, ...] = ()
    window: int | None = None
    sinks: Tensor | None = None
    dsinks: Tensor | None = None
    softcap: float | None = None

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.out, self.dq, self.dk, self.dv


def make_example(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    masks: tuple[Mask, ...] = (),
    value_dim: int | None = None,
    window: int | None = None,
    has_sinks: bool = False,
    softcap: float | None = None,
) -> Example:
    """Random inputs that `dtype` holds exactly, `value_dim` of values; results always in fp64."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    values = value_dim or head_dim
    q, k, v, grad_out = (
        torch.randn(sum(lengths), count, size, generator=generator, dtype=torch.float64).to(dtype).double()
        for count, size in ((num_heads, head_dim), (kv_heads, head_dim), (kv_heads, values), (num_heads, values))
    )
    sinks = torch.randn(num_heads, generator=generator, dtype=torch.float64).to(dtype).double() if has_sinks else None
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v, *([] if sinks is None else [sinks]))]
    q_leaf, k_leaf, v_leaf, *rest = leaves
    out = packed_attention(q_leaf, k_leaf, v_leaf, lengths, masks, window, rest[0] if rest else None, softcap)
    dq, dk, dv, *of_sinks = torch.autograd.grad(out, leaves, grad_out)
    results = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    dsinks = of_sinks[0] if of_sinks else None
    return Example(
        lengths=lengths,
        q=q,
        k=k,
        v=v,
        grad_out=grad_out,
        **results,
        masks=masks,
        window=window,
        sinks=sinks,
        dsinks=dsinks,
        softcap=softcap,
    )


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    masks: tuple[Mask, ...] = (),
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[tokens, heads, head_dim]: what its mask allows within each sequence, by softmax over all scores.

    A token sees the `window` last ones, itself among them; the scores of a row have the `sinks` [heads] among them.
    """
    parts = zip(*(torch.split_with_sizes(tensor, lengths) for tensor in (q, k, v)), strict=True)
    of_each = zip(parts, masks or [CAUSAL] * len(lengths), strict=True)
    return torch.cat(
        [_sequence_attention(*part, mask=mask, window=window, sinks=sinks, softcap=softcap) for part, mask in of_each]
    )


def _sequence_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    k, v = k.repeat_interleave(repeats, dim=0), v.repeat_interleave(repeats, dim=0)
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = torch.from_numpy(~seen(Masked(mask, q.shape[1]), in_windows=window is not None))
    if window is not None:
        unseen |= torch.ones_like(unseen).tril(-window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(unseen), 1)), dim=-1)
    out: Tensor = scores.softmax(-1)[..., : len(unseen)] @ v
    return out.transpose(0, 1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of the expected value."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def absolute_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference; 0 for empty tensors."""
    return float((found.double() - expected.double()).abs().max()) if expected.numel() else 0.0
