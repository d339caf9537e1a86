"""Group of one micro-batch as seen by one of its members: the base of every framework's ring."""

from __future__ import annotations

from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.runtime.layouts.layout import Hop, RingLayout, ShardLayout


class RingMember:
    """One member's place in a ring, and its work there. Cheap to create: no communication.

    Not a dataclass: FSDP2 copies dataclasses among a module's arguments, and calls counted on a copy would be lost.

    Attributes:
        layout: tokens of each member.
        index: this member's index in `ranks`.
        ranks: global ranks of the members, in ring order.
        attention_calls: number of `attention` calls; if it stays 0, the session raises.
    """

    __slots__ = ("attention_calls", "index", "layout", "ranks")

    def __init__(self, layout: ShardLayout, index: int, ranks: tuple[int, ...]) -> None:
        assert len(ranks) == layout.degree, (ranks, layout)
        assert 0 <= index < len(ranks), index
        self.layout = layout
        self.index = index
        self.ranks = ranks
        self.attention_calls = 0

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def ring_layout(self) -> RingLayout:
        """Return the layout of the ring; with Ulysses, only valid for `ring_of_head_group`."""
        assert isinstance(self.layout, RingLayout), self.layout
        return self.layout

    @property
    def heads_degree(self) -> int:
        """Return the Ulysses degree: number of members that split the heads of their joint tokens."""
        return self.layout.heads_degree

    @property
    def tokens(self) -> int:
        """Return the number of tokens of this member, without padding."""
        return self.layout.tokens(self.index)

    def source(self, hop: int) -> int:
        """Return the member whose keys and values this one holds at `hop`: itself at hop 0, then its predecessors."""
        return (self.index - hop) % self.degree

    def work(self, hop: int, *, packed: bool = True) -> tuple[Hop, ...]:
        """Return this member's kernel calls at `hop`; see `RingLayout.hops`."""
        return self.ring_layout.hops(self.index, self.source(hop), packed=packed)

    def check_shapes(self, q: Any, k: Any, v: Any) -> None:
        """Validate that q, k and v [1, heads, tokens, head_dim] of any framework are this member's shard.

        Heads of v may have another size.
        """
        if q.ndim != 4 or q.shape[0] != 1:
            raise RunError(
                f"attention takes q of shape [1, heads, tokens, head_dim], got {tuple(q.shape)}: pack the batch"
            )
        if k.shape[:3] != v.shape[:3] or k.shape[2:] != q.shape[2:] or k.shape[0] != 1 or q.shape[1] % k.shape[1]:
            raise RunError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
        shared = self.heads_degree
        if q.shape[1] % shared or (k.shape[1] % shared and shared % k.shape[1]):
            raise RunError(
                f"the plan shares heads among {shared} ranks, which {q.shape[1]} query heads and {k.shape[1]} "
                "key/value heads cannot be; plan with 'fcp plan --attention ring', or for the model that you train"
            )
        if q.shape[2] < self.tokens:
            raise RunError(
                f"rank {self.ranks[self.index]} holds {self.tokens} tokens of this micro-batch, but q has "
                f"{q.shape[2]}: feed the model the micro-batch's own shard"
            )
