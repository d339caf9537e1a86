"""State spaces (Mamba-2), for `state_layers`.

A head updates a state S [N, P] for each token t of time step d_t (Dao and Gu, "Transformers are SSMs"):

    S <- e^(d_t A) S + d_t b_t x_t^T               y_t = S^T c_t + D x_t

A < 0 and D are scalars per head. A run of tokens with time steps of sum s therefore multiplies its initial state by
e^(s A), and its t-th token reads it by e^(s_t A) c_t. One call of an unmodified kernel with empty initial states gives
the rest, at the cost of a single rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.states.state_layers import Chunks, Tokens, in_batches


class ScanTokens(NamedTuple):
    """Inputs of a scan over consecutive tokens.

    Attributes:
        c, b: [1, T, G, N] read and write projections of the states, per group of heads.
        x: [1, T, H, P]
        step: [1, T, H] time steps, >= 0.
    """

    c: Tensor
    b: Tensor
    x: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Kernel of state spaces.

    Attributes:
        call: function with the signature that `mamba_ssm` and transformers share.
        takes_packs: whether the kernel supports packed sequences (`seq_idx`).
        decay: A, [H].
        skip: D, [H] or [H, P]; None without a skip connection.
        chunk_size: number of tokens per kernel block.
        heads_said: format of its heads in messages; see `StateRule`.
    """

    call: Callable[..., Any]
    takes_packs: bool
    decay: Tensor
    skip: Tensor | None
    chunk_size: int
    heads_said: str = "the {values} heads of state spaces in {keys} groups"

    def of_heads(self, member: Ring) -> Scan:
        skip = None if self.skip is None else member.own_heads(self.skip)
        return replace(self, decay=member.own_heads(self.decay), skip=skip)

    def alone(self, tokens: Tokens, lengths: tuple[int, ...]) -> Tensor:
        if self.takes_packs and len(lengths) > 1:
            numbers = _sequence_numbers(lengths, tokens[2].device)
            out: Tensor = self._called(tokens, seq_idx=numbers, return_final_states=False)
            return out
        return self._runs(tokens, lengths)[0]

    def in_chunks(self, tokens: Tokens, lengths: tuple[int, ...]) -> Chunks:
        c, _, _, step = tokens
        out, left = self._runs(tokens, lengths)
        parts = torch.split_with_sizes(step[0] * self.decay.to(step.dtype), lengths)
        sums = [part.cumsum(0) for part in parts]  # per run: a total over all runs would lose small values
        factors = torch.cat(sums).exp()
        whole = torch.stack([part[-1] for part in sums]).exp()
        return Chunks(out, (c[0], factors), whole[..., None, None].to(left.dtype), left)

    def read(self, reads: Tokens, state: Tensor) -> Tensor:
        read: Tensor = _Read.apply(*reads, state)  # type: ignore[no-untyped-call]
        return read

    def idle(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        _, b, x, _ = tokens
        heads, dtype = x.shape[2], lse_dtype(x.dtype)
        return x.new_ones(heads, 1, 1, dtype=dtype), x.new_zeros(heads, b.shape[-1], x.shape[-1], dtype=dtype)

    def _runs(self, tokens: Tokens, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        def batch(some: Tokens) -> tuple[Tensor, Tensor]:
            out, left = self._called(some, return_final_states=True)
            return out, left.mT

        return in_batches(tokens, lengths, self.chunk_size, batch)

    def _called(self, tokens: Tokens, **more: Any) -> Any:
        c, b, x, step = tokens
        return self.call(x, step, self.decay, b, c, chunk_size=self.chunk_size, D=self.skip, **more)


class _Read(torch.autograd.Function):
    """Readout factors * (c @ state); backward recomputes the product instead of saving a layer-wide fp32 tensor."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, factors: Tensor, state: Tensor) -> Tensor:
        ctx.save_for_backward(c, factors, state)
        return factors.to(state.dtype)[..., None] * _product(c, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, factors, state = ctx.saved_tensors
        of_factors = (grad * _product(c, state)).sum(-1)
        of_product = _by_groups(factors.to(state.dtype)[..., None] * grad, c.shape[1])
        of_c = of_product @ _columns(state, c.shape[1]).mT
        of_state = c.to(state.dtype).transpose(0, 1).mT @ of_product  # [G, N, H / G x P]
        return (
            of_c.transpose(0, 1).to(c.dtype),
            of_factors.to(factors.dtype),
            of_state.unflatten(-1, (-1, state.shape[-1])).transpose(1, 2).reshape(state.shape),
        )


def _product(c: Tensor, state: Tensor) -> Tensor:
    """Return the reads [T, H, P] of states [H, N, P] by c [T, G, N], per group of heads."""
    found = c.to(state.dtype).transpose(0, 1) @ _columns(state, c.shape[1])
    return found.transpose(0, 1).reshape(c.shape[0], len(state), -1)


def _columns(state: Tensor, groups: int) -> Tensor:
    """Return the states of each group's heads side by side, [G, N, H / G x P]."""
    return torch.unflatten(state, 0, (groups, -1)).transpose(1, 2).flatten(2)


def _by_groups(rows: Tensor, groups: int) -> Tensor:
    """Reshape [T, H, P] to [G, T, H / G x P]."""
    return torch.unflatten(rows, 1, (groups, -1)).flatten(2).transpose(0, 1)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _sequence_numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the sequence number [1, T] of each token."""
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return to_device(torch.from_numpy(numbers), device).unsqueeze(0)
