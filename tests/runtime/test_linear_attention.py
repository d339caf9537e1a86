"""Linear attention and short convolutions over shards, all members of a group in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.lockstep import run_lockstep
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import RunError
from fcp_cli.memory.activations import state_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.layers import LayerKind, Linear
from fcp_cli.models.model import load_model
from fcp_cli.runtime import recurrent
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.recompute import keep_attention
from fcp_cli.runtime.recurrent import DeltaRule, DeltaTokens, carry, run_rule, short_convolution
from fcp_cli.runtime.ring import Ring
from fcp_cli.util.masks import CAUSAL, full
from fcp_cli.verification.emulation import Mailbox, ThreadTransport
from fcp_cli.verification.order import check_order
from tests.runtime.emulation import recorded_members
from tests.runtime.sharded_layers import GROUPS, PACKS, Shards, bytes_of_first_member, on_ranks, require_equal

pytestmark = pytest.mark.torch

KEY_HEADS, HEADS, KEY_SIZE, SIZE, KERNEL = 2, 4, 3, 5, 4


def rule_by_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule as its formula says it, token by token."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        parts = [
            rule_by_tokens(
                *(tensor[:, a:b] for tensor in (query, key, value)),
                g=g[:, a:b],
                beta=beta[:, a:b],
                initial_state=None if initial_state is None else initial_state[run : run + 1],
            )
            for run, (a, b) in enumerate(pairwise(ends))
        ]
        return torch.cat([out for out, _ in parts], dim=1), torch.cat([left for _, left in parts])
    repeats = value.shape[2] // key.shape[2]
    query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    batch, tokens, heads, size = value.shape
    state = value.new_zeros(batch, heads, key.shape[-1], size) if initial_state is None else initial_state
    outs = []
    for token in range(tokens):
        k, strength = key[:, token, :, :, None], beta[:, token, :, None, None]
        state = g[:, token, :, None, None].exp() * (state - strength * k @ (k.mT @ state))
        state = state + strength * k @ value[:, token, :, None, :]
        outs.append((query[:, token, :, None, :] @ state)[:, :, 0] * key.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1), state


BY_TOKENS = DeltaRule(call=rule_by_tokens, takes_packs=False, options={})
OF_PACKS = DeltaRule(call=rule_by_tokens, takes_packs=True, options={})


@cache
def example(lengths: tuple[int, ...]) -> tuple[Shards, Tensor]:
    """What the rule takes of a pack, [tokens, ...] each, and the gradient of what it gives."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    inputs = [draw(KEY_HEADS, KEY_SIZE), draw(KEY_HEADS, KEY_SIZE), draw(HEADS, SIZE)]
    return [*inputs, -draw(HEADS).abs() / 4, draw(HEADS).sigmoid()], draw(HEADS, SIZE)


@cache
def alone(lengths: tuple[int, ...]) -> Shards:
    """What comes out of the whole pack, and the gradients."""
    inputs, grad_out = example(lengths)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    parts = zip(*(torch.split_with_sizes(leaf[None], lengths, 1) for leaf in leaves), strict=True)
    out = torch.cat([rule_by_tokens(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts], dim=1)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def delta_rule(rule: DeltaRule) -> Callable[[Shards, Ring], Tensor]:
    return lambda inputs, ring: run_rule(rule, DeltaTokens(*inputs), ring)


@pytest.mark.parametrize("lengths", PACKS)
def test_any_group_computes_the_rule_of_one_process(lengths: tuple[int, ...]) -> None:
    for number, group in enumerate(GROUPS):
        rule = (BY_TOKENS, OF_PACKS)[number % 2]
        found, rings = on_ranks(lengths, group, *example(lengths), delta_rule(rule), padding=number % 3)
        require_equal(found, alone(lengths))
        assert {(ring.context.forward_calls, ring.context.backward_calls) for ring in rings} == {(1, 1)}


@pytest.mark.parametrize("keeps", [False, True])
def test_a_recomputed_layer_computes_the_same(keeps: bool) -> None:
    def recomputed(inputs: Shards, ring: Ring) -> Tensor:
        kept: dict[str, Any] = {"context_fn": keep_attention} if keeps else {}
        out: Tensor = checkpoint(lambda *t: delta_rule(OF_PACKS)(list(t), ring), *inputs, use_reentrant=False, **kept)
        return out

    found, rings = on_ranks((9, 26), (3, 1), *example((9, 26)), recomputed)
    require_equal(found, alone((9, 26)))
    assert {ring.context.forward_calls for ring in rings} == {1}


@pytest.mark.parametrize(
    ("degree", "factor"), [(4, (KEY_SIZE, KEY_SIZE)), (3, (1, 1))], ids=["matrices", "what is left of each state"]
)
def test_states_travel_in_pieces_whose_order_cannot_deadlock(
    degree: int, factor: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear attention multiplies states by matrices, state spaces by one factor of a head."""
    sequences = 3
    generator = torch.Generator().manual_seed(0)
    times = torch.randn(2 * degree, sequences, HEADS, *factor, generator=generator, dtype=torch.float64)
    plus = torch.randn(2 * degree, sequences, HEADS, KEY_SIZE, SIZE, generator=generator, dtype=torch.float64)
    state, states = torch.zeros_like(plus[0]), []
    for chunk in range(2 * degree):
        states.append(state)
        state = (times[chunk] * state if factor == (1, 1) else times[chunk] @ state) + plus[chunk]
    each = KEY_SIZE * SIZE * 8
    for piece_bytes in (1, 5 * each, 1 << 20):
        monkeypatch.setattr(recurrent, "PIECE_BYTES", piece_bytes)
        members, recorders = recorded_members(shard_layout((9, 9, 9), degree), tuple(range(degree)))
        own = [[i, 2 * degree - 1 - i] for i in range(degree)]
        found = run_lockstep(
            [carry(member, "state", times[o], plus[o]) for member, o in zip(members, own, strict=True)]
        )
        for arrived, o in zip(found, own, strict=True):
            torch.testing.assert_close(arrived, torch.stack([states[chunk] for chunk in o]), rtol=0, atol=1e-12)
        operations = {rank: recorder.operations for rank, recorder in recorders.items()}
        check_order(operations)
        sent = [sum(op.num_bytes for op in ops if op.verb == "send") for ops in operations.values()]
        assert sent == [sequences * HEADS * each * ways for ways in (1, *[2] * (degree - 2), 1)]


def convolved(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda rows: functional.conv1d(
        rows, weight[:, None], padding=KERNEL - 1, groups=len(weight)
    )[..., : rows.shape[-1]].sigmoid()  # fmt: skip


@pytest.mark.parametrize("lengths", PACKS)
def test_any_group_convolves_as_one_process(lengths: tuple[int, ...]) -> None:
    weight = torch.randn(HEADS * SIZE, KERNEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, drawn = example(lengths)
    rows = drawn.flatten(1)

    def on_ring(inputs: Shards, ring: Ring) -> Tensor:
        return short_convolution(convolved(weight), inputs[0].transpose(1, 2), KERNEL, ring).transpose(1, 2)

    leaf = rows.clone().requires_grad_()
    out = torch.cat([convolved(weight)(part.T[None])[0].T for part in torch.split_with_sizes(leaf, lengths)])
    wanted = [out.detach(), *torch.autograd.grad(out, [leaf], rows)]
    for number, group in enumerate(GROUPS):
        found, _ = on_ranks(lengths, group, [rows], rows, on_ring, padding=number % 3)
        require_equal(found, wanted)


def test_a_shard_that_does_not_fit_is_refused() -> None:
    inputs = [tensor[None] for tensor in example((9, 26))[0]]
    ring = Ring(shard_layout((9, 26, 1), 1))
    with pytest.raises(RunError, match="given a batch of 1 with 35 tokens, but rank 0 holds 36"):
        run_rule(BY_TOKENS, DeltaTokens(*inputs), ring)
    with pytest.raises(RunError, match="given a batch of 1 with 35 tokens, but rank 0 holds 36"):
        short_convolution(lambda rows: rows, inputs[2].flatten(2).transpose(1, 2), KERNEL, ring)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    layout, transport = shard_layout((9, 26), 3, 3), ThreadTransport(Mailbox(), 0)
    inputs = [tensor[None] for tensor in example((9, 26))[0]]
    with pytest.raises(RunError, match=r"among 3 ranks, which the 2 key heads and 4 value heads .* cannot be"):
        run_rule(BY_TOKENS, DeltaTokens(*inputs), Ring(layout, 0, (0, 1, 2), transport))


def test_masks_are_refused() -> None:
    ring = Ring(shard_layout((9, 26), 1, 1, (full(), CAUSAL)))
    with pytest.raises(RunError, match="the pack has masks"):
        run_rule(BY_TOKENS, DeltaTokens(*(tensor[None] for tensor in example((9, 26))[0])), ring)


class Kernel(torch.autograd.Function):
    """Keeps what kernels of the rule keep, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        _, _, value, *_ = tensors
        ctx.save_for_backward(*(tensor.contiguous() for tensor in tensors))
        return torch.zeros_like(value), torch.zeros_like(tensors[-1])


def kept_bytes(length: int, sequences: int, degree: int) -> int:
    """Bytes that a member keeps for the backward of a layer in bf16, with gates in fp32."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **given: Any) -> Any:
        runs = len(given["cu_seqlens"]) - 1 if "cu_seqlens" in given else 1
        start = torch.zeros(runs, HEADS, KEY_SIZE, value.shape[-1]) if given["initial_state"] is None else None
        begun = given["initial_state"] if start is None else start
        return Kernel.apply(query, key, value, g, beta, begun)  # type: ignore[no-untyped-call]

    def run(ring: Ring) -> None:
        sizes = ((KEY_HEADS, KEY_SIZE), (KEY_HEADS, KEY_SIZE), (HEADS, SIZE), (HEADS,), (HEADS,))
        inputs = [torch.ones(1, ring.tokens, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        inputs[3] = torch.ones(1, ring.tokens, HEADS, requires_grad=True)
        run_rule(DeltaRule(call=kernel, takes_packs=True, options={}), DeltaTokens(*inputs), ring)

    return bytes_of_first_member((length,) * sequences, degree, run)


def test_memory_counts_what_rings_keep_beside_one_rank() -> None:
    spec = replace(
        load_model("qwen3-next"),
        linear=Linear(key_heads=KEY_HEADS, value_heads=HEADS, key_size=KEY_SIZE, value_size=SIZE, kernel_size=KERNEL),
    )
    of_sequence, of_token = state_bytes(spec, LayerKind("linear"), precision_of(Recipe()))

    def more(length: int, sequences: int) -> int:
        return kept_bytes(length, sequences, 2) - kept_bytes(length // 2, sequences, 1)

    starts = HEADS * KEY_SIZE * SIZE * 4  # with which the kernel begins on one rank, too
    assert more(16, 2) - more(8, 2) == 2 * (16 - 8) // 2 * of_token
    assert more(8, 3) - more(8, 2) == of_sequence + 8 // 2 * of_token - starts
