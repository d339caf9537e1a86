"""Linear attention by the gated delta rule over a ring's shards.

The rule keeps a state S [Dk, Dv] for each head, and for each token t (Yang et al., "Gated Delta Networks")

    S <- e^(g_t) (I - b_t k_t k_t^T) S + b_t k_t v_t^T             o_t = q_t^T S / sqrt(Dk)

in which S is multiplied from the left and something is added, so that all of a chunk together is affine in the state
that it begins with: o_t = r_t S + z_t, and it leaves A S + B. One call of an unmodified kernel gives all four: with
values [v | 0] of size Dv + Dk and the state [0 | I] to begin with, outputs are [z | r] and what is left is [B | A].
So a member computes its chunks before it knows with which states they begin; `linear_states` brings these, and r_t S is
added. A member alone runs the rule on whole sequences.

Where sets of members share the heads, they exchange tokens for heads of queries, keys, values, decays and strengths, as
attention does (`shared_heads`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from fcp_cli.errors import RunError
from fcp_cli.runtime.group_member import GroupMember
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layout import CACHED_LAYOUTS
from fcp_cli.runtime.linear_convolution import begin_layer
from fcp_cli.runtime.linear_states import states_at_chunks
from fcp_cli.runtime.recompute import attention_stage
from fcp_cli.runtime.ring import Ring, begin_backward
from fcp_cli.runtime.shared_heads import HeadSharing
from fcp_cli.runtime.transport import drive

_BLOCK = 64  # tokens to which the rule in PyTorch pads: runs that need equally many make a batch


class Tokens(NamedTuple):
    """What the rule takes of tokens that lie one behind the other.

    Attributes:
        query, key: [1, T, G, Dk]
        value: [1, T, H, Dv]; H is a multiple of G.
        decay: [1, T, H], the logarithm of what a token leaves of the state.
        strength: [1, T, H], how much of the value it writes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor

    def rows(self, start: int, stop: int | None = None) -> Tokens:
        return Tokens(*(tensor[:, start:stop] for tensor in self))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """A kernel of the gated delta rule.

    Attributes:
        call: by the signature that `fla` and transformers share, without `g`, `beta` and what follows them here.
        takes_packs: whether it keeps sequences apart by their boundaries (`cu_seqlens`).
        options: handed on to it.
    """

    call: Callable[..., tuple[Tensor, Tensor | None]]
    takes_packs: bool
    options: dict[str, Any]

    def batch(self, tokens: Tokens, starts: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
        """Return outputs, and what is left of states [N, H, Dk, Dv], of sequences [N, T, ...] or packed ones."""
        query, key, value, decay, strength = tokens
        out, left = self.call(
            query,
            key,
            value,
            g=decay,
            beta=strength,
            initial_state=starts,
            output_final_state=True,
            **self.options,
            **more,
        )
        assert left is not None
        return out, left

    def runs(self, tokens: Tokens, lengths: tuple[int, ...], starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run it on runs of tokens that do not see each other.

        Args:
            tokens: all runs, one behind the other.
            lengths: of the runs, each at least 1; there is at least one.
            starts: [H, Dk, Dv], the state with which each begins; None: empty ones.

        Returns:
            Outputs [1, T, H, Dv], and the states that are left [runs, H, Dk, Dv].
        """
        each = None if starts is None else starts.expand(len(lengths), *starts.shape)
        if len(lengths) == 1:
            return self.batch(tokens, each)
        if self.takes_packs:
            return self.batch(tokens, each, cu_seqlens=_boundaries(lengths, tokens.value.device))
        outs: list[Tensor] = [tokens.value] * len(lengths)
        lefts = list(outs)
        ends = np.cumsum(lengths)
        for group in _alike(lengths):
            # A token of zeros leaves the state as it is, so that padding changes nothing.
            batch = Tokens(
                *(
                    pad_sequence([tensor[0, ends[run] - lengths[run] : ends[run]] for run in group], batch_first=True)
                    for tensor in tokens
                )
            )
            out, left = self.batch(batch, None if each is None else each[: len(group)])
            for place, run in enumerate(group):
                outs[run], lefts[run] = out[place, : lengths[run]], left[place]
        return torch.cat(outs).unsqueeze(0), torch.stack(lefts)


def _alike(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return runs by how many blocks of the rule they take."""
    groups: dict[int, list[int]] = {}
    for run, length in enumerate(lengths):
        groups.setdefault(-(-length // _BLOCK), []).append(run)
    return list(groups.values())


@lru_cache(maxsize=CACHED_LAYOUTS)
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where runs begin and the last one ends; one tensor for all layers, by which kernels know their plans."""
    return to_device(torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cpu"), device)


def gated_delta_rule(rule: DeltaRule, tokens: Tokens, ring: Ring) -> Tensor:
    """Compute the rule over the micro-batch's pack, of which each member of the ring holds a shard.

    Collective over the ring's members, and so is its backward. Every sequence begins with an empty state.

    Args:
        rule: the kernel.
        tokens: the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond `ring.tokens` are padding,
            and as a sequence of their own.
        ring: the micro-batch's ring.

    Returns:
        [1, tokens, H, Dv], like the values.

    Raises:
        RunError: the shard does not fit the ring, or heads cannot be shared as the plan says.
    """
    stage = attention_stage.get()
    return _compute(rule, tokens, ring) if stage is None else stage.attend(lambda: _compute(rule, tokens, ring))


def _compute(rule: DeltaRule, tokens: Tokens, ring: Ring) -> Tensor:
    _check_heads(tokens, ring)
    held, (batch, given) = ring.tokens, tokens.value.shape[:2]
    begin_layer(ring, batch, given)
    padding = given - held
    if ring.degree == 1:
        out, _ = rule.runs(tokens, (*ring.layout.lengths, *([padding] if padding else [])))
    else:
        out = _in_set(rule, tokens.rows(0, held), ring)
        out = torch.cat((out, rule.batch(tokens.rows(held), None)[0]), dim=1) if padding else out
    counted: Tensor = _Counted.apply(out, ring)  # type: ignore[no-untyped-call]
    return counted


class _Counted(torch.autograd.Function):
    """Hands on what a layer gives; its backward, the layer's first, is counted, on whatever ring."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        begin_backward(ctx.ring)
        return grad, None


def _check_heads(tokens: Tokens, ring: Ring) -> None:
    keys, values, shared = tokens.key.shape[2], tokens.value.shape[2], ring.heads_degree
    if values % shared or (keys % shared and shared % keys):
        raise RunError(
            f"the plan shares heads among {shared} ranks, which the {keys} key heads and {values} value heads of "
            "linear attention cannot be; plan with 'fcp plan --attention ring'"
        )


def _in_set(rule: DeltaRule, own: Tokens, ring: Ring) -> Tensor:
    """Compute the rule for a member of a group of several, without padding."""
    if ring.heads_degree == 1:
        return _around_ring(rule, own, ring)
    exchange, heads = ring.in_set(), own.value.shape[2]
    query, key = _swapped(exchange, own.query[0], own.key[0])
    (value,) = _swapped(exchange, own.value[0])
    # In one message, and so in one type: that of decays, fp32, in which the rule computes with both.
    (gates,) = _swapped(exchange, torch.stack((own.decay[0], own.strength[0].to(own.decay.dtype)), dim=-1))
    of_heads = (query, key, value, gates[..., 0], gates[..., 1].to(own.strength.dtype))
    out = _around_ring(rule, Tokens(*(tensor.unsqueeze(0) for tensor in of_heads)), ring.around_ring())
    back: Tensor = _ToTokens.apply(out[0], exchange, heads)  # type: ignore[no-untyped-call]
    return back.unsqueeze(0)


def _around_ring(rule: DeltaRule, held: Tokens, member: GroupMember) -> Tensor:
    """Compute the rule for what a member of a ring of several holds: fronts and backs of all sequences, by turns."""
    sizes = np.stack((member.layout.fronts(member.index), member.layout.backs(member.index)), axis=1).ravel()
    live = np.flatnonzero(sizes)
    value, width = held.value, held.value.shape[-1]
    heads, key_size = value.shape[2], held.key.shape[-1]
    dtype = lse_dtype(value.dtype)
    identity = torch.eye(key_size, dtype=dtype, device=value.device).expand(heads, -1, -1)
    nothing = identity.new_zeros(heads, key_size, width)
    if not live.size:  # of sequences of few tokens; what others send passes through
        passed = torch.cat((nothing, identity), dim=-1).expand(len(sizes), -1, -1, -1)
        # The sum of nothing ties both ends into the graph: backward must run here, too.
        states = _arriving(passed + value.sum().to(dtype), width, member)
        return value + states.sum().to(value.dtype)
    extended = held._replace(value=torch.cat((value, value.new_zeros(*value.shape[:-1], key_size)), dim=-1))
    lengths = tuple(sizes[live].tolist())
    out, left = rule.runs(extended, lengths, torch.cat((nothing, identity), dim=-1))
    places = to_device(torch.from_numpy(live), value.device)
    if live.size < sizes.size:
        passed = torch.cat((nothing, identity), dim=-1).to(left.dtype).expand(len(sizes), -1, -1, -1)
        left = passed.index_copy(0, places, left)
    states = _arriving(left, width, member)
    reads = torch.split_with_sizes(out[0, ..., width:], lengths)
    added = [_read(read, states[run % 2, run // 2]) for read, run in zip(reads, live.tolist(), strict=True)]
    return (out[..., :width] + torch.cat(added)).to(value.dtype)


def _arriving(left: Tensor, width: int, member: GroupMember) -> Tensor:
    """Return the states [2, sequences, H, Dk, Dv] with which chunks begin, of what they leave, by turns of a sequence:
    [runs, H, Dk, Dv + Dk].
    """
    of_chunks = left.view(-1, 2, *left.shape[1:]).transpose(0, 1)
    return states_at_chunks(member, of_chunks[..., width:], of_chunks[..., :width])


def _read(reads: Tensor, state: Tensor) -> Tensor:
    """Return what tokens [T, H, Dk] read of a state [H, Dk, Dv]: [T, H, Dv]."""
    return (reads.to(state.dtype).transpose(0, 1) @ state).transpose(0, 1)


def _swapped(exchange: HeadSharing, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange tokens for heads."""
    swapped: tuple[Tensor, ...] = _ToHeads.apply(exchange, *tensors)  # type: ignore[no-untyped-call]
    return swapped


class _ToHeads(torch.autograd.Function):
    """`HeadSharing.to_heads` of tensors [T, heads, D], with its gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadSharing, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.heads = exchange, [tensor.shape[1] for tensor in tensors]
        return tuple(part.clone() for part in drive(exchange.to_heads("heads", *tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *drive(ctx.exchange.to_tokens("tokens", *grads, heads=ctx.heads))


class _ToTokens(torch.autograd.Function):
    """`HeadSharing.to_tokens` of one tensor [T of the set, heads / u, D], with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: HeadSharing, heads: int) -> Tensor:
        ctx.exchange = exchange
        (own,) = drive(exchange.to_tokens("tokens", tensor, heads=(heads,)))
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (of_set,) = drive(ctx.exchange.to_heads("heads", grad))
        return of_set.clone(), None, None
