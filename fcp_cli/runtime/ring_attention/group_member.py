"""One member of a group, as attention sees it, and what attention keeps between its two passes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fcp_cli.runtime.agreement.grad_ring import GradRingDtype
from fcp_cli.runtime.communication.transport import Transport
from fcp_cli.runtime.layouts.layout import ShardLayout
from fcp_cli.runtime.layouts.ring_member import RingMember
from fcp_cli.runtime.ring_attention.shared_heads import UlyssesExchange


class AttentionSpec(NamedTuple):
    """The settings of a layer's attention, the same on all members of a group.

    Attributes:
        scale: factor on the scores.
        window: tokens that a token attends to, itself included, or None for all before it.
        softcap: scores s become softcap * tanh(s / softcap), before sinks, or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class SavedForBackward(NamedTuple):
    """What the backward of one call needs of its forward: of the tokens and heads that this member attended with.

    Attributes:
        q: [T, H, D]
        k, v: [T, G, D] and [T, G, Dv]
        out: [T, H, Dv], of the member's own tokens and all heads: the model keeps it in any case.
        lse: [T, H]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class GroupMember(RingMember):
    """One member of a group that can run the passes.

    Attributes:
        transport: carries the messages; None is enough for degree 1.
        grad_dtype: in which gradients of keys and values travel; see `GradRingDtype`.
    """

    __slots__ = ("grad_dtype", "transport")

    def __init__(
        self,
        layout: ShardLayout,
        index: int = 0,
        ranks: tuple[int, ...] = (0,),
        transport: Transport | None = None,
        grad_dtype: GradRingDtype = "fp32",
    ) -> None:
        super().__init__(layout, index, ranks)
        assert len(ranks) == 1 or transport is not None, "a group of several members needs a transport"
        self.transport = transport
        self.grad_dtype = grad_dtype

    def ring_of_head_group(self) -> GroupMember:
        """Return this member's place in the ring of its part of the heads."""
        shared = self.heads_degree
        ranks = self.ranks[self.index % shared :: shared]
        return GroupMember(self.layout.ring, self.index // shared, ranks, self.transport, self.grad_dtype)

    def own_heads(self, of_all: Tensor) -> Tensor:
        """Return a view of [H] with the heads that this member attends with."""
        share = of_all.shape[0] // self.heads_degree
        return of_all.narrow(0, self.index % self.heads_degree * share, share)

    def head_exchange(self) -> UlyssesExchange:
        """Return this member's part in the exchanges of those that share the heads with it."""
        assert self.transport is not None
        place = self.index % self.heads_degree
        members = range(self.index - place, self.index - place + self.heads_degree)
        ranks = self.ranks[members.start : members.stop]
        return UlyssesExchange(ranks, place, [self.layout.tokens(member) for member in members], self.transport)
