"""Attention in sliding windows, with sinks and with soft caps on scores, all members in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels import AttentionKernel, cpu
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.kernels.select import capped_kernel
from fcp_cli.runtime.layout import Segments, shard_layout
from fcp_cli.runtime.recompute import keep_attention
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.session import outside
from fcp_cli.runtime.windows import halo_of
from fcp_cli.util.masks import CAUSAL, Mask, chunk_pairs, full, prefix, segments
from fcp_cli.verification.order import check_order
from tests.runtime.emulation import require_exact, run_emulated, run_recorded
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import absolute_error, make_example, relative_error

pytestmark = pytest.mark.torch

PACKS: list[tuple[int, ...]] = [(1,), (5, 7, 13, 37, 101), (64,), (3, 3, 3, 100, 1)]
GROUPS = [(u, r) for u in (1, 2, 4) for r in range(1, 9) if u * r <= 8]


@pytest.mark.full
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("lengths", PACKS)
def test_any_group_computes_attention_in_any_windows_in_fp64(lengths: tuple[int, ...], has_sinks: bool) -> None:
    check_windows(lengths, (1, 2, 6, 30, 99, 101, None), GROUPS, has_sinks=has_sinks)


def test_groups_compute_attention_in_windows_in_fp64() -> None:
    check_windows(PACKS[1], (2, 9, 60), [(1, 1), (1, 2), (1, 5), (2, 3)], has_sinks=True)


def check_windows(
    lengths: tuple[int, ...],
    windows: Sequence[int | None],
    groups: Sequence[tuple[int, int]],
    *,
    has_sinks: bool,
    masks: tuple[Mask, ...] = (),
) -> None:
    for window in windows:
        example = make_example(lengths, (4, 2), head_dim=8, window=window, has_sinks=has_sinks, masks=masks)
        for shared, ring in groups:
            ranks = tuple(range(shared * ring))
            found, operations = run_recorded(example, ranks, heads_degree=shared)
            for one, expected in zip(found, example.results, strict=True):
                assert absolute_error(one, expected) <= 1e-12, (window, shared, ring)
            check_order(operations)


MASKED: dict[str, tuple[tuple[int, ...], tuple[Mask, ...]]] = {
    "images": ((101, 40), (segments([(0, 3), (20, 41), (41, 50), (77, 101)]), CAUSAL)),
    "all": ((1, 13, 64), (full(), full(), prefix(37))),
    # Of the token between two images only the first member holds anything; the others pass on what lies beyond it.
    "images a token apart": ((70,), (segments([(3, 23), (24, 44), (45, 65)]),)),
    # Layers without windows are causal; of one whose window holds all, images still see themselves both ways.
    "images in windows alone": ((75, 20), (segments([(3, 23), (24, 60)], windows_only=True), full())),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MASKED)
def test_any_group_computes_attention_in_windows_of_masked_sequences(name: str) -> None:
    check_windows(MASKED[name][0], (1, 2, 6, 30, 99, None), GROUPS, has_sinks=True, masks=MASKED[name][1])


@pytest.mark.parametrize("name", MASKED)
def test_a_window_limits_how_far_back_tokens_see_and_not_what_their_mask_lets_them_see_ahead(name: str) -> None:
    lengths, masks = MASKED[name]
    windows = (2, 75, None) if any(mask.windows_only for mask in masks) else (2, 30)
    check_windows(lengths, windows, [(1, 1), (1, 4), (2, 2)], has_sinks=False, masks=masks)


def test_with_masks_the_rest_of_a_span_travels_and_nothing_else() -> None:
    example = make_example((640,), (4, 2), head_dim=8, window=11, masks=(segments([(70, 90), (300, 310)]),))
    _, operations = run_recorded(example, (0, 1, 2, 3))
    row = 2 * 2 * 8 * 8  # keys and values of two heads, fp64
    halos = [[o.num_bytes // row for o in operations[i] if o.content == "halo" and o.verb == "recv"] for i in range(4)]
    # Chunks of 80 tokens; the one that ends within the first span needs ten rows of the next member, too.
    assert halos == [2 * [10 + 10], 2 * [10, 10], 2 * [10, 10], 2 * [10]]
    assert {o.content for member in operations.values() for o in member} == {"halo", "dhalo"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_has_the_error_of_one_device(dtype: torch.dtype) -> None:
    masks = (CAUSAL, segments([(3, 50), (99, 120)]), CAUSAL, CAUSAL)
    example = make_example((5, 200, 1, 55), (4, 2), dtype=dtype, window=20, has_sinks=True, masks=masks)
    alone = run_emulated(example, 1, dtype)
    for degree in (2, 3, 8):
        for one, own, expected in zip(run_emulated(example, degree, dtype), alone, example.results, strict=True):
            most = 2e-6 if dtype == torch.float32 else 2 * relative_error(own, expected)
            assert relative_error(one, expected) <= most


def test_only_halos_travel_in_an_order_without_deadlocks() -> None:
    """Keys and values forward, again backward, and their gradients: of 2 (window - 1) rows a member, at any length."""
    row = 2 * 2 * 8 * 4  # keys and values of two heads, fp32
    for length in (200, 600):
        example = make_example((length,), (4, 2), head_dim=8, dtype=torch.float32, window=11)
        _, operations = run_recorded(example, (3, 5, 8, 9), torch.float32)
        check_order(operations)
        sent = [(o.content, o.peer, o.num_bytes // row) for o in operations[5] if o.verb == "send"]
        # To the next member's front and the previous one's back; gradients go back to where rows came from.
        assert sent == 2 * [("halo", 8, 10), ("halo", 3, 10)] + [("dhalo", 3, 10), ("dhalo", 8, 10)]
        # What a member without neighbours on one side sends: the first one's front starts the sequence.
        assert [o.content for o in operations[3] if o.verb == "send"] == ["halo", "halo", "dhalo"]


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_each_row_of_others_that_is_read_arrives_once_and_no_other(degree: int) -> None:
    for lengths, index, reach in product(PACKS, range(degree), (1, 3, 40, 200)):
        halo = halo_of(shard_layout(lengths, degree), index, reach)
        read = halo.before[halo.before >= halo.tokens]  # places in a buffer of own rows and, behind, received ones
        assert np.unique(read).size == halo.received, (lengths, index, reach)


def test_a_window_that_holds_whole_sequences_is_the_ring() -> None:
    lengths = (37, 50)
    runs = [run_recorded(make_example(lengths, (4, 2), window=window), (0, 1))[1][0] for window in (50, 51, None)]
    assert runs[0] == runs[1] == runs[2]
    assert {operation.content for operation in runs[0]} == {"kv", "dkv"}


@pytest.mark.parametrize(
    "kernel",
    [
        CpuKernel(),
        DenseKernel(),
        NpuKernel(FakeNpu(head_major=True, stats_dtype=torch.float64)),
        NpuKernel(FakeNpu(head_major=False, stats_dtype=torch.float64)),
    ],
    ids=["cpu", "dense", "npu", "npu token-major"],
)
def test_kernels_align_windows_at_the_last_keys(kernel: AttentionKernel) -> None:
    example = make_example((40,), (4, 2), window=9)
    rows = slice(11, 40)
    segments = Segments((29,), (37,), causal=True, window=9)
    q, k, v = example.q[rows], example.k[3:], example.v[3:]
    out, lse = kernel.forward(q, k, v, segments, example.scale)
    assert absolute_error(out, example.out[rows]) <= 1e-12
    dq, dk, _ = kernel.backward(example.grad_out[rows], q, k, v, out, lse, segments, example.scale)
    assert absolute_error(dq, example.dq[rows]) <= 1e-12
    assert absolute_error(dk[-20:], example.dk[-20:]) <= 1e-12


def test_the_cpu_kernel_computes_blocks_of_queries_with_the_keys_of_their_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int]] = []

    def counted(forward: Callable[..., object]) -> Callable[..., object]:
        def run(q: Tensor, k: Tensor, *args: object, **kwargs: object) -> object:
            calls.append((q.shape[2], k.shape[2]))
            return forward(q, k, *args, **kwargs)

        return run

    monkeypatch.setattr(cpu, "_forward", counted(cpu._forward))
    example = make_example((1200,), (1, 1), head_dim=8, window=50)
    (out, *_), _ = run_recorded(example, (0, 1, 2))
    assert absolute_error(out, example.out) <= 1e-12
    pairs = sum(rows * keys for rows, keys in calls)
    assert pairs <= 1200 * (128 + 2 * 50)  # by windows and blocks, not by lengths: 1200 x 1200


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "images"])
@pytest.mark.parametrize("window", [None, 9])
def test_any_group_computes_capped_attention_in_fp64(window: int | None, masked: bool) -> None:
    """softcap * tanh(score / softcap), as in Gemma 2."""
    given: dict[str, Any] = {"head_dim": 8, "window": window}
    given["masks"] = (segments([(3, 20), (30, 57)]), CAUSAL, CAUSAL) if masked else ()
    example, plain = (make_example((57, 13, 1), (4, 2), **given, softcap=cap) for cap in (0.7, None))
    assert absolute_error(example.dq, plain.dq) > 0.1, "the cap is felt"
    for degree, shared in ((1, 1), (2, 1), (5, 1), (4, 2)):
        require_exact(example, degree, shared)


KINDS: dict[str, dict[str, Any]] = {
    "sinks": {"window": 20, "has_sinks": True},
    "soft cap": {"window": 12, "softcap": 0.7},
    "sinks and soft cap": {"window": 12, "has_sinks": True, "softcap": 0.7},
}


@pytest.mark.parametrize("how", ["plain", "recomputed", "attention kept", "compiled", "outside"])
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_gives_the_gradients_of_one_process_however_the_layer_runs(kind: str, how: str) -> None:
    lengths = (90,) if how == "outside" else (90, 37)
    example = make_example(lengths, (4, 2), **KINDS[kind])
    ring = None if how == "outside" else Ring(shard_layout(lengths, 1))
    batched = [tensor.transpose(0, 1)[None].clone().requires_grad_() for tensor in (example.q, example.k, example.v)]
    given = batched if example.sinks is None else [*batched, example.sinks.clone().requires_grad_()]

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attention(q, k, v, ring=ring, window=example.window, sinks=sinks, softcap=example.softcap) * 1.0

    run: Callable[..., Tensor] = layer
    if how == "compiled":
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    elif how in ("recomputed", "attention kept"):
        kept: dict[str, Any] = {"context_fn": keep_attention} if how == "attention kept" else {}
        run = partial(checkpoint, layer, use_reentrant=False, **kept)
    with outside() if ring is None else nullcontext():
        out = run(*given)
    grads = torch.autograd.grad(out, given, example.grad_out.transpose(0, 1)[None])
    for one, expected in zip((out.detach(), *grads), example.results, strict=False):
        assert absolute_error(one[0].transpose(0, 1), expected) <= 1e-12
    if example.dsinks is not None:
        assert absolute_error(grads[3], example.dsinks) <= 1e-12


def test_what_cannot_be_is_named() -> None:
    ring, q = Ring(shard_layout((8,), 1)), torch.randn(1, 4, 8, 8)
    with pytest.raises(RunError, match=r"window=0; a token attends to itself at least, so 1 or more"):
        attention(q, q, q, ring=ring, window=0)
    masked = Ring(shard_layout((8,), 1, 1, (chunk_pairs([4]),)))
    with pytest.raises(RunError, match=r"windows of 3 tokens is for .* order of their tokens, but some .* chunk pairs"):
        attention(q, q, q, ring=masked, window=3)
    with pytest.raises(RunError, match=r"sinks of shape \(2,\) do not fit the 4 query heads: give one for each"):
        attention(q, q, q, ring=ring, sinks=torch.zeros(2))
    with pytest.raises(
        RunError, match=r"no attention kernel .*bfloat16 on cuda has soft caps on scores \(softcap=50.0\)"
    ):
        capped_kernel("cuda", torch.bfloat16, 50.0)
    with pytest.raises(RunError, match=r"softcap=0\.0; scores are capped at a number above 0"):
        capped_kernel("cpu", torch.float32, 0.0)
