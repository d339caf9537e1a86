"""Linear attention with the gated delta rule, for `state_layers`.

The rule updates a state S [Dk, Dv] per head for each token t (Yang et al., "Gated Delta Networks"):

    S <- e^(g_t) (I - b_t k_t k_t^T) S + b_t k_t v_t^T             o_t = q_t^T S / sqrt(Dk)

Each update is affine in S, so a whole chunk is affine in its initial state S: its outputs are o_t = r_t S + z_t, and
its final state is A S + B. One call of an unmodified kernel gives all four: with values [v | 0] of size Dv + Dk and
initial state [0 | I], outputs are [z | r] and the final state is [B | A].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.states.state_layers import Chunks, Tokens, in_batches

_BLOCK = 64  # tokens to which the PyTorch implementation pads


class DeltaTokens(NamedTuple):
    """Inputs of the rule over consecutive tokens.

    Attributes:
        query, key: [1, T, G, Dk]
        value: [1, T, H, Dv]; H is a multiple of G.
        decay: [1, T, H] logarithm of the state's decay (g).
        strength: [1, T, H] fraction of the value to write (b).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """Kernel of the gated delta rule.

    Attributes:
        call: function with the signature that `fla` and transformers share.
        takes_packs: whether the kernel supports packed sequences (`cu_seqlens`).
        options: keyword arguments of `call`.
        heads_said: format of its heads in messages; see `StateRule`.
    """

    call: Callable[..., tuple[Tensor, Tensor | None]]
    takes_packs: bool
    options: dict[str, Any]
    heads_said: str = "the {keys} key heads and {values} value heads of linear attention"

    def of_heads(self, member: Ring) -> DeltaRule:
        return self

    def alone(self, tokens: Tokens, lengths: tuple[int, ...]) -> Tensor:
        return self._runs(tokens, lengths)[0]

    def in_chunks(self, tokens: Tokens, lengths: tuple[int, ...]) -> Chunks:
        query, key, value, decay, strength = tokens
        size, width = key.shape[-1], value.shape[-1]
        extended = torch.cat((value, value.new_zeros(*value.shape[:-1], size)), dim=-1)
        identity, nothing = self.idle(tokens)
        starts = torch.cat((nothing, identity), dim=-1)
        out, left = self._runs((query, key, extended, decay, strength), lengths, starts)
        return Chunks(out[..., :width], (out[0, ..., width:],), left[..., width:], left[..., :width])

    def read(self, reads: Tokens, state: Tensor) -> Tensor:
        return (reads[0].to(state.dtype).transpose(0, 1) @ state).transpose(0, 1)

    def idle(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        _, key, value, *_ = tokens
        heads, size, dtype = value.shape[2], key.shape[-1], lse_dtype(value.dtype)
        identity = torch.eye(size, dtype=dtype, device=value.device).expand(heads, -1, -1)
        return identity, identity.new_zeros(heads, size, value.shape[-1])

    def _runs(self, tokens: Tokens, lengths: tuple[int, ...], starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the kernel on runs of tokens, all with initial state `starts` [H, Dk, Dv]; None is an empty state."""

        # A pack is a batch of one, but needs an initial state for each of its `runs`.
        def batch(some: Tokens, **more: Any) -> tuple[Tensor, Tensor]:
            query, key, value, decay, strength = some
            out, left = self.call(
                query,
                key,
                value,
                g=decay,
                beta=strength,
                initial_state=None if starts is None else starts.expand(more.pop("runs", len(value)), *starts.shape),
                output_final_state=True,
                **self.options,
                **more,
            )
            assert left is not None
            return out, left

        if self.takes_packs and len(lengths) > 1:
            return batch(tokens, runs=len(lengths), cu_seqlens=_boundaries(lengths, tokens[2].device))
        return in_batches(tokens, lengths, _BLOCK, batch)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the boundaries (`cu_seqlens`) of runs. One tensor for all layers: kernels cache plans by identity."""
    return to_device(torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cpu"), device)
