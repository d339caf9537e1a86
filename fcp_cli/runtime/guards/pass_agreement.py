"""Compare attention passes over the ranks of a ring in the first step of a loop, before each pass begins.

In later steps a rank knows how often the loop runs attention on a ring, and raises at an extra pass (`guards`). In the
first step it can only ask the other ranks: if only some of them ran a pass, they would take the hops of another pass
for its own, and hang at the last. So each rank announces a pass to the next rank of its ring, between hosts, and waits
for the announcement of the previous rank. Later steps have no such cost.
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
    """Attention passes of one rank in the first step of a loop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._orders: dict[Ring, int] = {}  # index of the micro-batch of each ring in use

    def watch(self, ring: Ring, order: int) -> None:
        """Compare the passes on a micro-batch's ring from now on, if it has several ranks."""
        if ring.degree > 1:
            self._orders[ring] = order
            ring.context.begin_pass = partial(self.begin, ring)

    def begin(self, ring: Ring, kind: str, number: int) -> None:
        """Raise RunError unless the previous rank begins the same pass. All ranks of a ring call it before each pass.

        Args:
            ring: ring of the micro-batch.
            kind: `forward`, `backward` or `recomputed forward`.
            number: number of the pass among those of its kind on this ring.
        """
        # Orders count from 1, so that zeros mean no announcement.
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
        """Raise RunError if ranks of any ring run further passes on it.

        Called once per step rather than per micro-batch: a rank whose last backward reduces gradients stays in it until
        the others have run theirs, and a loop may defer its backwards.
        """
        for ring in list(self._orders):
            self.begin(ring, _END, 0)
            ring.context.begin_pass = None
            del self._orders[ring]


def _named(told: tuple[int, ...], order: int) -> str:
    where, kind, number = told
    place = "" if where == order else f" in micro-batch {where - 1}"
    return f"runs no more{place}" if _KINDS[kind] == _END else f"begins {_KINDS[kind]} {number}{place}"
