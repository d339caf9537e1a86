"""The ring's passes and its autograd function, all members in one process."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.lockstep import LockstepTransport, run_lockstep
from benchmarks.ring_ops import PATHS, count_unhidden
from fcp_cli.errors import RunError
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.kernels import AttentionKernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import AttentionSpec, MicroBatchContext, Ring, current_ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.ring_passes import ring_forward
from fcp_cli.runtime.transport import BufferPool, Handle
from fcp_cli.util.masks import CAUSAL, Mask, full, segments
from fcp_cli.verification.emulation import Mailbox, ThreadTransport
from fcp_cli.verification.order import Operation, check_order
from tests.runtime.emulation import (
    GatheringCpuKernel,
    require_error_of_one_device,
    require_exact,
    run_emulated,
    run_recorded,
    unshard,
    use_kernel,
)
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import (
    HEADS,
    PACKS,
    Example,
    absolute_error,
    make_example,
    packed_attention,
    relative_error,
)

pytestmark = pytest.mark.torch

DEGREES = range(1, 9)
GRAD_DTYPES: tuple[GradRingDtype, ...] = ("fp32", "bf16")


KERNELS: dict[str, tuple[AttentionKernel, torch.dtype]] = {
    "cpu in fp64": (CpuKernel(), torch.float64),
    "cpu in fp32": (CpuKernel(), torch.float32),
    "gathered rows": (GatheringCpuKernel(), torch.float64),
    "npu, head-major": (NpuKernel(FakeNpu(head_major=True)), torch.float32),
    "npu, token-major": (NpuKernel(FakeNpu(head_major=False)), torch.float32),
}


@pytest.mark.examples(7)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("kernel", "packs"),
    [
        ("cpu in fp64", PACKS),
        ("cpu in fp32", [(64,), (5, 7, 13, 37, 101), (200, 1, 55)]),
        ("gathered rows", PACKS),
        ("npu, head-major", [(5, 7, 13, 37, 101)]),
        ("npu, token-major", [(5, 7, 13, 37, 101)]),
    ],
    ids=KERNELS,
)
def test_any_degree_computes_plain_attention(
    kernel: str, packs: list[tuple[int, ...]], heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, dtype = KERNELS[kernel]
    use_kernel(monkeypatch, own)
    for example in (make_example(lengths, heads, dtype=dtype) for lengths in packs):
        for degree in DEGREES:
            require_exact(example, degree, dtype=dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_in_bf16_a_ring_adds_less_error_than_one_device_has(heads: tuple[int, int]) -> None:
    example = make_example((5, 7, 13, 37, 101), heads, dtype=torch.bfloat16)
    for degree in DEGREES:
        require_error_of_one_device(run_emulated(example, degree, torch.bfloat16), example)


@pytest.mark.examples(1)
@pytest.mark.parametrize("sizes", [(12, 8), (7, 4), (8, 12)], ids=str)
def test_heads_of_values_may_have_a_size_of_their_own(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [make_example(lengths, (4, 2), sizes[0], value_dim=sizes[1]) for lengths in PACKS[1:3]]
    for kernel in (CpuKernel(), GatheringCpuKernel()):
        use_kernel(monkeypatch, kernel)
        for example, degree, shared in product(examples, DEGREES, (1, 2, 4)):
            if not degree % shared:
                require_exact(example, degree, shared)


def test_keys_and_values_of_different_sizes_travel_without_padding() -> None:
    example = make_example((100,), (4, 2), 12, value_dim=8, dtype=torch.bfloat16)
    found, operations = run_recorded(example, (3, 5, 9, 11, 12), torch.bfloat16)
    pair = 20 * 2 * (12 + 8) * 2
    assert sent_by(operations, 5) == [("kv", pair)] * 5 + [("kv+dkv", 3 * pair)] * 3 + [("dkv", 2 * pair)]
    check_order(operations)
    assert max(relative_error(*one) for one in zip(found, example.results, strict=True)) <= 1e-2


def test_an_odd_pair_in_bf16_is_followed_by_gradients_in_fp32() -> None:
    """Which begin on a boundary of four bytes."""
    example = make_example((7, 30), (3, 1), 7, value_dim=4, dtype=torch.bfloat16)
    found, _ = run_recorded(example, (0, 1, 2, 3), torch.bfloat16)
    assert max(relative_error(*one) for one in zip(found, example.results, strict=True)) <= 1e-2


def sent_by(operations: dict[int, list[Operation]], rank: int) -> list[tuple[str, int]]:
    """What a rank sent, and how many bytes, in order; forward, then backward."""
    return [(operation.content, operation.num_bytes) for operation in operations[rank] if operation.verb == "send"]


@pytest.mark.parametrize(("grad_dtype", "grad_bytes"), [("fp32", 4), ("bf16", 2)])
def test_gradients_of_keys_travel_in_fp32_or_in_the_type_of_the_keys(
    grad_dtype: GradRingDtype, grad_bytes: int
) -> None:
    example = make_example((64,), (4, 2), dtype=torch.bfloat16)
    _, operations = run_recorded(example, (0, 1), torch.bfloat16, grad_dtype)
    elements = 2 * 32 * 2 * 16
    assert sent_by(operations, 0) == [("kv", 2 * elements), ("kv", 2 * elements), ("dkv", grad_bytes * elements)]


def test_backward_sends_one_message_per_hop_which_holds_the_next_keys_and_the_last_gradients() -> None:
    _, operations = run_recorded(make_example((100,), (4, 2)), (3, 5, 9, 11, 12))
    pair = 2 * 20 * 2 * 16 * 8
    forward = [("kv", pair)] * 4
    backward = [("kv", pair), *[("kv+dkv", 2 * pair)] * 3, ("dkv", pair)]
    assert sent_by(operations, 5) == forward + backward
    assert {operation.peer for operation in operations[5] if operation.verb == "send"} == {9}
    assert {operation.peer for operation in operations[5] if operation.verb == "recv"} == {3}
    check_order(operations)


def test_empty_shards_send_nothing() -> None:
    """One token on four members: only the first holds keys, and the others hold no query that meets them."""
    _, operations = run_recorded(make_example((1,), (4, 2)), (0, 1, 2, 3))
    assert all(operation.num_bytes > 0 for issued in operations.values() for operation in issued)
    # The pair of the first comes around the ring, and its gradients one hop behind.
    assert [operation.content for operation in operations[3] if operation.verb == "send"] == ["kv+dkv", "dkv"]
    check_order(operations)


@pytest.mark.parametrize("path", PATHS)
def test_a_kernel_runs_while_each_message_of_a_ring_is_in_flight(path: str) -> None:
    """Compiled graphs save the member's own pair, so backward waits for the previous member's."""
    for degree in (2, 3, 4, 7):
        exposed = ["kv"] if "compiled" in path else []
        assert count_unhidden(degree, **PATHS[path]) == ([], exposed), degree


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_gradients_that_travel_in_bf16_stay_within_twice_the_error_of_one_device(degree: int) -> None:
    example = make_example((5, 7, 13, 37, 101, 300), (4, 2), dtype=torch.bfloat16)
    errors = {}
    for grad_dtype in GRAD_DTYPES:
        found, _ = run_recorded(example, tuple(range(degree)), torch.bfloat16, grad_dtype)
        require_error_of_one_device(found, example)
        errors[grad_dtype] = [relative_error(*pair) for pair in zip(found, example.results, strict=True)]
    assert errors["fp32"][:2] == errors["bf16"][:2], "the output and dq do not travel"
    if degree > 2:  # with two members nothing is summed on the way: the sum is rounded once, at home
        assert errors["fp32"][2] < errors["bf16"][2]


def test_lock_step_reports_a_message_that_never_comes() -> None:
    layout = shard_layout((8,), 2)
    ring = Ring(layout, 0, (0, 1), LockstepTransport(Mailbox(), 0))
    q = torch.randn(4, 2, 8)
    with pytest.raises(RunError, match="rank 0 waits for kv from rank 1, which never arrives"):
        run_lockstep([ring_forward(ring, q, q, q, AttentionSpec(1.0))])


class FirstMessage(Exception):
    """The files of fcp through which attention came to send its first message, outermost first."""


class TracingTransport:
    """Ends a pass at its first message."""

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
        raise FirstMessage(list(dict.fromkeys(Path(name).name for name in frames if "/fcp_cli/" in name))[::-1])


@pytest.mark.parametrize(("heads_degree", "window"), [(1, None), (1, 2), (2, None)])
def test_attention_sends_its_first_message_through_five_files_at_most(heads_degree: int, window: int | None) -> None:
    ring = Ring(shard_layout((16,), 4, heads_degree), 0, (0, 1, 2, 3), TracingTransport())
    q = torch.randn(1, 2, ring.tokens, 8)
    with pytest.raises(FirstMessage) as sent:
        attention(q, q, q, ring=ring, window=window)
    (files,) = sent.value.args
    assert files[0] == "ring_attention.py" and files[-1] == "transport.py" and len(files) <= 5, files


class Member:
    """One rank of a pack that runs as a thread: its ring and its shard, in the shape that models use."""

    def __init__(self, example: Example, ring: Ring, pad: int = 0) -> None:
        index = torch.from_numpy(ring.layout.index(ring.index))
        self.ring = ring
        self.q, self.k, self.v = (
            _shard(tensor, index, pad).requires_grad_() for tensor in (example.q, example.k, example.v)
        )
        self.grad_out = _shard(example.grad_out, index, pad)

    def grads(self) -> list[Tensor]:
        """[tokens, heads, head_dim] of q, k and v, without padding."""
        grads = []
        for leaf in (self.q, self.k, self.v):
            assert leaf.grad is not None
            assert not leaf.grad[:, :, self.ring.tokens :].any(), "padding gets no gradient"
            grads.append(leaf.grad[0].transpose(0, 1)[: self.ring.tokens])
        return grads


def _shard(tensor: Tensor, index: Tensor, pad: int) -> Tensor:
    local = torch.cat((tensor[index], torch.full((pad, *tensor.shape[1:]), 7.0, dtype=tensor.dtype)))
    return local.transpose(0, 1).unsqueeze(0).contiguous()


def run_members(example: Example, degree: int, step: Callable[[Member], None], pad: int = 0) -> list[Member]:
    """Run `step(member)` on a thread per member."""
    layout, mailbox, ranks = shard_layout(example.lengths, degree, 1, example.masks), Mailbox(), tuple(range(degree))
    members = [Member(example, Ring(layout, rank, ranks, ThreadTransport(mailbox, rank)), pad) for rank in ranks]
    with ThreadPoolExecutor(degree) as pool:
        list(pool.map(step, members))
    return members


def check_gradients(example: Example, members: list[Member]) -> None:
    layout = members[0].ring.layout
    for parts, expected in zip(
        zip(*(m.grads() for m in members), strict=True), (example.dq, example.dk, example.dv), strict=True
    ):
        assert absolute_error(unshard(layout, list(parts)), expected) <= 1e-12


@contextmanager
def made_current(ring: Ring) -> Iterator[None]:
    token = current_ring.set(ring)
    try:
        yield
    finally:
        current_ring.reset(token)


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_attention_differentiates_through_the_current_ring(degree: int, pad: int) -> None:
    example = make_example((5, 1, 30), (4, 2))

    def step(member: Member) -> None:
        with made_current(member.ring):
            out = attention(member.q, member.k, member.v)
        assert out.shape == member.q.shape
        assert not out[:, :, member.ring.tokens :].any(), "padding gives zeros"
        torch.autograd.backward(out, member.grad_out)

    check_gradients(example, run_members(example, degree, step, pad))


def test_a_rank_without_tokens_gives_zeros_and_gets_zero_gradients() -> None:
    idle = Ring(shard_layout((), 1))
    q, k = torch.randn(1, 4, 1, 8, requires_grad=True), torch.randn(1, 2, 1, 8, requires_grad=True)
    out = attention(q, k, k, ring=idle)
    torch.autograd.backward(out.sum())
    assert q.grad is not None
    assert k.grad is not None
    assert not out.any()
    assert not q.grad.any()
    assert not k.grad.any()


def test_a_gradient_without_memory_of_its_own_is_accepted() -> None:
    """`sum()` hands back one expanded number, which kernels cannot read as it lies."""
    example = make_example((9, 4), (4, 2))
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0).requires_grad_() for tensor in (example.q, example.k, example.v))
    torch.autograd.backward(attention(q, k, v, ring=Ring(shard_layout((9, 4), 1))).sum())
    plain = make_example((9, 4), (4, 2))
    leaves = [tensor.requires_grad_() for tensor in (plain.q, plain.k, plain.v)]
    torch.autograd.backward(packed_attention(leaves[0], leaves[1], leaves[2], (9, 4)).sum())
    for found, expected in zip((q, k, v), leaves, strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert absolute_error(found.grad[0].transpose(0, 1), expected.grad) <= 1e-12


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("masks", [(), (CAUSAL, full(), segments([(2, 9), (15, 24)]))], ids=["causal", "masked"])
def test_attention_follows_an_explicit_ring_with_and_without_recomputation(
    masks: tuple[Mask, ...], degree: int, how: str
) -> None:
    example = make_example((5, 1, 30), (4, 2), masks=masks)

    def step(member: Member) -> None:
        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, ring=member.ring)

        leaves = member.q, member.k, member.v
        out = block(*leaves) if how == "plain" else checkpoint(block, *leaves, use_reentrant=how == "reentrant")
        torch.autograd.backward(out, member.grad_out)

    check_gradients(example, run_members(example, degree, step))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_without_an_explicit_ring_is_refused(use_reentrant: bool) -> None:
    q = torch.randn(1, 4, 8, 8, requires_grad=True)
    ring = Ring(shard_layout((8,), 1))
    with made_current(ring):
        out = checkpoint(attention, q, q, q, use_reentrant=use_reentrant)
        # Still current while backward runs, which is how it would go unnoticed.
        with pytest.raises(RunError, match=r"inside backward \(activation recomputation\).*pass ring=microbatch\.ring"):
            torch.autograd.backward(out.sum())


def test_two_forwards_may_come_before_the_first_backward() -> None:
    """Backward uses the ring and the window that its forward saw, not those that are current by then."""
    first, second = make_example((5, 1, 30), (4, 2), seed=1, window=8), make_example((17,), (4, 2), seed=2)
    layouts = [shard_layout(example.lengths, 2) for example in (first, second)]
    mailbox = Mailbox()

    def step(rank: int) -> list[Member]:
        transport = ThreadTransport(mailbox, rank)
        context = MicroBatchContext()  # and one pool of buffers
        rings = [Ring(layout, rank, (0, 1), transport, context=context) for layout in layouts]
        members = [Member(example, ring) for example, ring in zip((first, second), rings, strict=True)]
        outs = []
        for member, example in zip(members, (first, second), strict=True):
            with made_current(member.ring):
                outs.append(attention(member.q, member.k, member.v, window=example.window))
        for member, out in zip(members, outs, strict=True):
            torch.autograd.backward(out, member.grad_out)
        return members

    with ThreadPoolExecutor(2) as pool:
        per_rank = list(pool.map(step, (0, 1)))
    for i, example in enumerate((first, second)):
        check_gradients(example, [members[i] for members in per_rank])


class HoldingTransport(ThreadTransport):
    """Holds the tensors of all messages, as NCCL does until the device has sent them."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        super().__init__(mailbox, rank)
        self.held: list[Tensor] = []

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        self.held += [tensor for tensor in (send, receive) if tensor is not None]
        return super().start(kind, send, to, receive, source)


@pytest.mark.parametrize("heads_degree", [1, 2])
def test_all_layers_of_a_rank_send_from_two_buffers_which_nothing_saves(heads_degree: int) -> None:
    """Over two micro-batches in flight; head exchanges and the pairs that forwards save have memory of their own."""
    layout, mailbox = shard_layout((64, 9), 4 * heads_degree, heads_degree), Mailbox()
    ranks = tuple(range(layout.degree))

    def step(rank: int) -> None:
        transport, pool, saved = HoldingTransport(mailbox, rank), BufferPool(), []
        rings = [Ring(layout, rank, ranks, transport, context=MicroBatchContext(buffers=pool)) for _ in range(2)]
        leaf = torch.randn(1, 2, rings[0].tokens, 8, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(_place(tensor)) or tensor,  # type: ignore[func-returns-value]
            lambda tensor: tensor,
        )
        outs = []
        for ring in rings:
            hidden = leaf
            with hooks:
                for _ in range(3):
                    hidden = attention(hidden, hidden, hidden, ring=ring)
            outs.append(hidden)
        transport.held.clear()
        for out in outs:
            torch.autograd.backward(out.sum())
        sent = {_place(tensor) for tensor in transport.held if tensor.ndim == 1}
        assert len(sent) == 2
        assert not sent & set(saved)

    with ThreadPoolExecutor(layout.degree) as pool:
        list(pool.map(step, ranks))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_pool_replaces_a_buffer_that_is_too_small() -> None:
    pool, cpu = BufferPool(), torch.device("cpu")
    small = pool.lend(8, cpu)
    pool.take_back(small)
    with torch.inference_mode():
        large = pool.lend(16, cpu)
    pool.take_back(large)
    again = pool.lend(8, cpu)
    assert again is large and pool.lend(8, cpu) is not large
    again.zero_()  # by training, after an evaluation


def test_outside_a_microbatch_attention_says_what_is_missing() -> None:
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(RunError, match=r"outside a micro-batch: pass ring=microbatch\.ring"):
        attention(q, q, q)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((2, 4, 8, 8), (2, 4, 8, 8), r"\[1, heads, tokens, head_dim\], got \(2, 4, 8, 8\)"),
        ((1, 4, 8, 8), (1, 3, 8, 8), r"k \(1, 3, 8, 8\).*do not fit q"),
        ((1, 4, 5, 8), (1, 4, 5, 8), "holds 8 tokens of this micro-batch, but q has 5"),
    ],
)
def test_shapes_that_do_not_fit_the_ring_are_named(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], message: str
) -> None:
    ring = Ring(shard_layout((8,), 1))
    with pytest.raises(RunError, match=message):
        attention(torch.randn(q_shape), torch.randn(k_shape), torch.randn(k_shape), ring=ring)


def test_mixed_types_are_refused_and_autocast_mends_them() -> None:
    q, k = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    ring = Ring(shard_layout((8,), 1))
    with pytest.raises(RunError, match="different types"):
        attention(q, k, k, ring=ring)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, k, ring=ring).dtype == torch.bfloat16
        double = q.double()
        assert attention(double, double, double, ring=ring).dtype == torch.float64
