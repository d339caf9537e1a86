"""Attention in sliding windows and with sinks, all members in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, Mask, chunk_pairs, full, prefix, segments
from fcp_cli.runtime.kernels import AttentionKernel, cpu
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.layouts.layout import Segments, shard_layout
from fcp_cli.runtime.recomputation.recompute import keep_attention
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.session.outside import outside
from fcp_cli.verification.order import check_order
from tests.runtime.emulation import run_emulated, run_recorded
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import Example, absolute_error, make_example, relative_error

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


def leaves(example: Example) -> list[Tensor]:
    assert example.sinks is not None
    batched = [tensor.transpose(0, 1)[None] for tensor in (example.q, example.k, example.v)]
    return [tensor.clone().requires_grad_() for tensor in (*batched, example.sinks)]


def gradients(example: Example) -> tuple[Tensor, ...]:
    assert example.dsinks is not None
    return (*(tensor.transpose(0, 1)[None] for tensor in (example.dq, example.dk, example.dv)), example.dsinks)


@pytest.mark.parametrize("how", ["plain", "recomputed", "attention kept", "compiled", "outside"])
def test_autograd_gives_the_gradients_of_sinks_however_the_layer_runs(how: str) -> None:
    lengths = (90,) if how == "outside" else (90, 37)
    example = make_example(lengths, (4, 2), window=20, has_sinks=True)
    ring, given = Ring(shard_layout(lengths, 1)), leaves(example)

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        of = None if how == "outside" else ring
        return attention(q, k, v, ring=of, window=20, sinks=sinks) * 1.0

    def run(*tensors: Tensor) -> Tensor:
        if how == "recomputed":
            return checkpoint(layer, *tensors, use_reentrant=False)  # type: ignore[no-any-return]
        if how == "attention kept":
            return checkpoint(layer, *tensors, use_reentrant=False, context_fn=keep_attention)  # type: ignore[no-any-return]
        if how == "compiled":
            return torch.compile(layer, backend="aot_eager", fullgraph=True)(*tensors)
        with outside():
            return layer(*tensors)

    out = layer(*given) if how == "plain" else run(*given)
    assert absolute_error(out[0].transpose(0, 1).detach(), example.out) <= 1e-12
    found = torch.autograd.grad(out, given, example.grad_out.transpose(0, 1)[None])
    for one, expected in zip(found, gradients(example), strict=True):
        assert absolute_error(one, expected) <= 1e-12


def test_two_forwards_before_a_backward_keep_their_windows() -> None:
    first, second = (make_example((90,), (4, 2), seed=seed, window=w, has_sinks=True) for seed, w in ((0, 8), (1, 30)))
    given = [leaves(example) for example in (first, second)]
    ring = Ring(shard_layout((90,), 1))
    outs = [
        attention(*tensors[:3], ring=ring, window=example.window, sinks=tensors[3])
        for tensors, example in zip(given, (first, second), strict=True)
    ]
    for example, tensors, out in zip((first, second), given, outs, strict=True):
        found = torch.autograd.grad(out, tensors, example.grad_out.transpose(0, 1)[None])
        for one, expected in zip(found, gradients(example), strict=True):
            assert absolute_error(one, expected) <= 1e-12


def test_what_cannot_be_is_named() -> None:
    ring, q = Ring(shard_layout((8,), 1)), torch.randn(1, 4, 8, 8)
    with pytest.raises(RunError, match=r"window=0; a token attends to itself at least, so 1 or more"):
        attention(q, q, q, ring=ring, window=0)
    masked = Ring(shard_layout((8,), 1, 1, (chunk_pairs([4]),)))
    with pytest.raises(RunError, match=r"windows of 3 tokens is for .* order of their tokens, but some .* chunk pairs"):
        attention(q, q, q, ring=masked, window=3)
    with pytest.raises(RunError, match=r"sinks of shape \(2,\) do not fit the 4 query heads: give one for each"):
        attention(q, q, q, ring=ring, sinks=torch.zeros(2))
