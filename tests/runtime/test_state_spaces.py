"""State spaces over shards, all members of a group in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import RunError
from fcp_cli.memory.activations import state_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.layers import LayerKind, Mamba
from fcp_cli.models.model import load_model
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.recompute import keep_attention
from fcp_cli.runtime.recurrent import Scan, ScanTokens, run_rule
from fcp_cli.runtime.ring import Ring
from fcp_cli.verification.emulation import Mailbox, ThreadTransport
from tests.runtime.sharded_layers import GROUPS, PACKS, Shards, bytes_of_first_member, on_ranks, require_equal

pytestmark = pytest.mark.torch

CHUNK, STATE, HEADS, HEAD_SIZE = 4, 3, 4, 5


def scan_by_tokens(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """A scan as its formula says it, token by token, by the kernels' signature."""
    assert chunk_size == CHUNK
    repeats = x.shape[2] // b.shape[2]
    b, c = (tensor.repeat_interleave(repeats, dim=2) for tensor in (b, c))
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[-1], b.shape[-1])
    outs = []
    for token in range(x.shape[1]):
        if seq_idx is not None and token and seq_idx[0, token] != seq_idx[0, token - 1]:
            state = torch.zeros_like(state)
        step = dt[:, token, :, None, None]
        state = (step * decay[:, None, None]).exp() * state
        state = state + step * x[:, token, :, :, None] * b[:, token, :, None, :]
        outs.append((state @ c[:, token, :, :, None])[..., 0] + D[:, None] * x[:, token])
    out = torch.stack(outs, dim=1)
    return (out, state) if return_final_states else out


@cache
def example(lengths: tuple[int, ...], groups: int) -> tuple[Shards, Shards, Tensor]:
    """What a scan takes of a pack's tokens, [tokens, ...] each, its parameters, and the gradient of what it gives."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    of_tokens = [draw(tokens, groups, STATE), draw(tokens, groups, STATE), draw(tokens, HEADS, HEAD_SIZE)]
    steps = draw(tokens, HEADS).abs() / 2
    return [*of_tokens, steps], [-draw(HEADS).abs(), draw(HEADS)], draw(tokens, HEADS, HEAD_SIZE)


def scan(*, takes_packs: bool = False) -> Callable[[Shards, Ring], Tensor]:
    def run(given: Shards, ring: Ring) -> Tensor:
        *tokens, decay, skip = given
        rule = Scan(call=scan_by_tokens, takes_packs=takes_packs, decay=decay, skip=skip, chunk_size=CHUNK)
        return run_rule(rule, ScanTokens(*tokens), ring)

    return run


@cache
def alone(lengths: tuple[int, ...], groups: int) -> Shards:
    """What comes out of the whole pack, and the gradients of tokens and parameters."""
    inputs, parameters, grad_out = example(lengths, groups)
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, *parameters)]
    *of_tokens, decay, skip = leaves
    parts = zip(*(torch.split_with_sizes(leaf[None], lengths, 1) for leaf in of_tokens), strict=True)
    outs = [scan_by_tokens(x, step, decay, b, c, chunk_size=CHUNK, D=skip) for c, b, x, step in parts]
    out = torch.cat(outs, dim=1)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.examples(3)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", PACKS)
def test_any_group_scans_as_one_process(lengths: tuple[int, ...], groups: int) -> None:
    inputs, parameters, grad_out = example(lengths, groups)
    for number, group in enumerate(GROUPS):
        run = scan(takes_packs=bool(number % 2))
        found, rings = on_ranks(lengths, group, inputs, grad_out, run, parameters=parameters, padding=number % 3)
        require_equal(found, alone(lengths, groups))
        assert {(ring.context.forward_calls, ring.context.backward_calls) for ring in rings} == {(1, 1)}


@pytest.mark.parametrize("keeps", [False, True])
def test_a_recomputed_scan_computes_the_same(keeps: bool) -> None:
    def recomputed(given: Shards, ring: Ring) -> Tensor:
        kept: dict[str, Any] = {"context_fn": keep_attention} if keeps else {}
        out: Tensor = checkpoint(lambda *t: scan()(list(t), ring), *given, use_reentrant=False, **kept)
        return out

    inputs, parameters, grad_out = example((9, 26), 2)
    found, rings = on_ranks((9, 26), (3, 1), inputs, grad_out, recomputed, parameters=parameters)
    require_equal(found, alone((9, 26), 2))
    assert {ring.context.forward_calls for ring in rings} == {1}


def test_heads_of_state_spaces_that_ranks_cannot_share_are_refused() -> None:
    layout, transport = shard_layout((9, 26), 3, 3), ThreadTransport(Mailbox(), 0)
    inputs, parameters, _ = example((9, 26), 2)
    ring = Ring(layout, 0, (0, 1, 2), transport)
    with pytest.raises(RunError, match=r"among 3 ranks, which the 4 heads of state spaces in 2 groups cannot be"):
        scan()([*(tensor[None] for tensor in inputs), *parameters], ring)


class Kernel(torch.autograd.Function):
    """Keeps what kernels of a scan keep, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        x, _, b, _ = tensors
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(x), torch.zeros(x.shape[0], HEADS, HEAD_SIZE, b.shape[-1])


def kept_bytes(length: int, sequences: int, degree: int) -> int:
    """Bytes that a member keeps for the backward of a layer in bf16, with time steps in fp32."""

    def kernel(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, **_: Any) -> Any:
        return Kernel.apply(x, dt, b, c)  # type: ignore[no-untyped-call]

    def run(ring: Ring) -> None:
        sizes = ((1, STATE), (1, STATE), (HEADS, HEAD_SIZE))
        tokens = [torch.ones(1, ring.tokens, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        tokens.append(torch.ones(1, ring.tokens, HEADS, requires_grad=True))
        decay = -torch.ones(HEADS, requires_grad=True)
        rule = Scan(call=kernel, takes_packs=False, decay=decay, skip=None, chunk_size=length)
        run_rule(rule, tuple(tokens), ring)

    return bytes_of_first_member((length,) * sequences, degree, run)


def test_memory_counts_what_rings_keep_of_state_spaces() -> None:
    figures = Mamba(heads=HEADS, head_size=HEAD_SIZE, groups=1, state_size=STATE, kernel_size=4, chunk_size=CHUNK)
    spec = replace(load_model("bamba-9b"), mamba=figures)
    of_sequence, of_token = state_bytes(spec, LayerKind("mamba"), precision_of(Recipe()))

    def kept(length: int) -> int:
        return kept_bytes(length, 3, 2) - kept_bytes(length, 2, 2)

    assert kept(16) - kept(8) == 8 // 2 * (of_token + ALONE)
    assert kept(8) == of_sequence + TRANSITIONS + 8 // 2 * (of_token + ALONE)


ALONE = 2 * (2 * STATE + HEADS * HEAD_SIZE) + 4 * HEADS  # what one rank keeps of a token, too
TRANSITIONS = 2 * 4 * HEADS * 2  # two factors of a head, twice; small enough to be left out
