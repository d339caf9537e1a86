"""Compare, in the first step of a loop, which pass of attention the ranks of a ring begin, before they begin it.

In later steps a rank knows how often a loop runs attention on a ring, and stops at one pass more (`guards`). At first,
there is nothing to compare with but the other ranks: a pass that only some of them run would take the hops of another
pass for its own, and wait for the last of them without end. So each rank announces the pass to the next one of its
ring, from host to host, and waits for the announcement of the one before. Later steps pay nothing for it.
"""

from __future__ import annotations

from functools import partial

import torch

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.ring_attention.ring import Ring

_END = "end"
_KINDS = ("forward", "backward", "recomputed forward", _END)


class PassAgreement:
    """The passes of one rank in the first step of a loop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._orders: dict[Ring, int] = {}  # micro-batch of each ring that has not ended

    def watch(self, ring: Ring, order: int) -> None:
        """Compare the passes of a ring of several ranks, that of a micro-batch, from now on."""
        if ring.degree > 1:
            self._orders[ring] = order
            ring.context.begin_pass = partial(self.begin, ring)

    def begin(self, ring: Ring, kind: str, number: int) -> None:
        """Make sure that the rank before begins the same pass. Every rank of the ring calls it, before each pass.

        Args:
            ring: the ring of the micro-batch.
            kind: `forward`, `backward` or `recomputed forward`.
            number: the number of the pass, among those of its kind on this ring.
        """
        # From 1 on, so that zeros are no announcement.
        mine = (self._orders[ring] + 1, _KINDS.index(kind), number)
        before = ring.ranks[ring.index - 1]
        theirs = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._world.swap(torch.tensor(mine, device="cpu"), ring.ranks[(ring.index + 1) % ring.degree], theirs, before)
        if theirs[0] and tuple(theirs.tolist()) != mine:  # simulated ranks do not answer
            raise RunError(
                f"{ring.place}: this rank {_named(mine, mine[0])} of attention, but rank {before} of its ring "
                f"{_named(tuple(theirs.tolist()), mine[0])}: run the model equally often in each micro-batch on every "
                "rank, and passes that only some ranks need in 'with fcp.outside():'"
            )

    def end_step(self) -> None:
        """Make sure that the ranks of all rings run no more on them.

        Not sooner: a rank whose last backward reduces gradients is in it until the others have run theirs, and a loop
        may hold its backwards back.
        """
        for ring in list(self._orders):
            self.begin(ring, _END, 0)
            ring.context.begin_pass = None
            del self._orders[ring]


def _named(told: tuple[int, ...], order: int) -> str:
    where, kind, number = told
    place = "" if where == order else f" in micro-batch {where - 1}"
    return f"runs no more{place}" if _KINDS[kind] == _END else f"begins {_KINDS[kind]} {number}{place}"
