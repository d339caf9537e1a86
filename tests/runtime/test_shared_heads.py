"""Groups whose ranks share heads in sets and run rings of them, all members in one process."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from benchmarks.lockstep import LockstepTransport
from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import of_products, row_products
from fcp_cli.runtime.layout import UlyssesLayout, shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import attention, group_forward
from fcp_cli.runtime.transport import Handle, drive
from fcp_cli.verification.emulation import Mailbox
from fcp_cli.verification.order import check_order
from tests.runtime.emulation import require_error_of_one_device, require_exact, run_emulated, run_recorded
from tests.runtime.reference import can_share, make_example, relative_error

pytestmark = pytest.mark.torch

GROUPS = [(u, r) for u in range(1, 9) for r in range(1, 9) if u > 1 and u * r <= 8]
LENGTHS: list[tuple[int, ...]] = [(1,), (5, 7, 13, 37, 101), (97, 1, 2)]


def heads_for(shared: int) -> list[tuple[int, int]]:
    """Query and key/value heads that `shared` ranks can share: divided among them, and replicated."""
    return [heads for heads in ((8, 8), (8, 2), (4, 1), (24, 3), (20, 5), (14, 7)) if can_share(heads, shared)]


@pytest.mark.examples(4)
@pytest.mark.parametrize(("shared", "ring"), GROUPS)
def test_any_sets_and_rings_compute_plain_attention_in_fp64(shared: int, ring: int) -> None:
    assert heads_for(shared)
    for heads in heads_for(shared):
        for lengths in LENGTHS:
            require_exact(make_example(lengths, heads, head_dim=8), shared * ring, shared)


@pytest.mark.parametrize(("shared", "ring"), [(2, 2), (4, 1), (4, 2)])
def test_replicated_key_heads_in_bf16_stay_within_twice_the_error_of_one_device(shared: int, ring: int) -> None:
    example = make_example((5, 7, 13, 37, 101), (8, 2), dtype=torch.bfloat16)
    require_error_of_one_device(run_emulated(example, shared * ring, torch.bfloat16, shared), example)


def test_a_set_exchanges_rows_of_exact_length_and_its_rings_carry_its_share_of_the_heads() -> None:
    example = make_example((101,), (8, 2), head_dim=4)
    _, operations = run_recorded(example, (3, 5, 8, 9), heads_degree=2)
    check_order(operations)
    tokens = [shard_layout((101,), 4, 2).tokens(member) for member in range(4)]
    assert tokens == [26, 25, 25, 25]
    row = 4 * 8  # of one head, in fp64
    sent = [(one.content, one.peer, one.num_bytes // row) for one in operations[3] if one.verb == "send"]
    of_set, of_next = tokens[0] + tokens[1], tokens[2] + tokens[3]
    assert sent == [
        ("heads", 5, tokens[0] * (4 + 1 + 1)),
        ("kv", 8, of_set * 2),
        ("tokens", 5, tokens[1] * 4),
        ("heads", 5, tokens[0] * 4),
        ("delta", 5, tokens[0]),  # a number of each of four heads
        ("kv", 8, of_next * 2),  # the pair of the other set, saved in forward, goes home
        ("dkv", 8, of_next * 2),
        ("tokens", 5, tokens[1] * (4 + 1 + 1)),
    ]


def test_what_stands_for_an_output_has_its_product_with_the_gradient() -> None:
    torch.manual_seed(0)
    for dtype, exact in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-3)):
        gradient, out = (torch.randn(50, 4, 128, dtype=dtype) for _ in range(2))
        gradient[7] = 0.0
        gradient[8] *= 1e-15
        delta = row_products(gradient, out)
        again = row_products(gradient, of_products(delta, gradient))
        assert torch.isfinite(again).all()
        assert relative_error(again, delta) <= exact
        assert relative_error(again[8], delta[8]) <= 10 * exact


@pytest.mark.parametrize("ring_degree", [1, 2])
def test_a_member_keeps_what_its_model_keeps_of_a_ring(ring_degree: int) -> None:
    """Of its own tokens, or as much of those of its set: nothing twice."""
    ranks = tuple(range(2 * ring_degree))
    ring = Ring(shard_layout((48 * len(ranks),), len(ranks), 2), 0, ranks, _Loopback())
    q, k = torch.randn(48, 8, 16), torch.randn(48, 2, 16)
    out, kept = drive(group_forward(ring, q, k, k.clone(), AttentionSpec(1.0)))
    assert kept.out is out
    sizes = [q.numel(), k.numel(), k.numel(), q.numel(), 48 * 8]
    assert [one.numel() for one in kept] == sizes
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    assert sum(held.values()) == 4 * sum(sizes)


class _Loopback:
    """Brings what was sent back to who sent it."""

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        assert send is not None
        assert receive is not None
        receive.copy_(send)
        return self

    def wait(self) -> None:
        pass


def test_sets_hold_what_members_of_their_ring_would_one_run_behind_the_other() -> None:
    for lengths in ((101, 3, 1), (4,), ()):
        layout, ring = shard_layout(lengths, 6, 3), shard_layout(lengths, 2)
        assert isinstance(layout, UlyssesLayout)
        assert layout.ring is ring
        for place in range(2):
            runs = [layout.index(3 * place + i).tolist() for i in range(3)]
            assert [*chain(*runs)] == ring.index(place).tolist()
            assert [len(run) for run in runs] == [layout.tokens(3 * place + i) for i in range(3)]
            assert max(map(len, runs)) - min(map(len, runs)) <= 1
            positions = [layout.position_ids(3 * place + i).tolist() for i in range(3)]
            assert [*chain(*positions)] == ring.position_ids(place).tolist()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (12, 3)])
def test_heads_that_a_set_cannot_share_are_named(heads: int, kv_heads: int) -> None:
    ring = Ring(shard_layout((8,), 4, 4), 0, (0, 1, 2, 3), LockstepTransport(Mailbox(), 0))
    q, k = torch.randn(1, heads, 2, 8), torch.randn(1, kv_heads, 2, 8)
    with pytest.raises(RunError, match=f"among 4 ranks, which {heads} query heads and {kv_heads} key/value heads"):
        attention(q, k, k, ring=ring)
