"""Communication of a MindSpore job: point-to-point hops, and a few small collectives over all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, communication, mint, ops
from mindspore.communication import GlobalComm

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError

# One group of all ranks that carries hops and nothing else; any ranks talk within it, so no ring needs its own.
_RING_GROUP = "fcp-rings"


class PendingExchange:
    """A pending exchange. Keeps sent tensors alive until they have been sent."""

    __slots__ = ("_handles", "_received", "_sent")

    def __init__(self, handles: Sequence[Any], sent: Tensor | None, received: Tensor | None) -> None:
        self._handles = handles
        self._sent = sent
        self._received = received

    def wait(self) -> Tensor | None:
        """Wait, and return the received tensors."""
        for handle in self._handles:
            handle.wait()
        return self._received


class MindSporeRanks:
    """All ranks of a MindSpore job, created by `join`. Collectives run in the same order on all ranks."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(
        self, sent: Tensor | None, to: int, received: Tensor | None, source: int, *, sends_first: bool
    ) -> PendingExchange:
        """Start one hop: a tensor to global rank `to`, and one from global rank `source`.

        Args:
            sent, received: contiguous tensors, or None for no message in that direction.
            sends_first: neighbours must differ here (members of odd number receive first), so that no ring blocks on
                a back end that sends only when the receiver is there.
        """
        group = _RING_GROUP
        posts = [
            (mint.distributed.isend, sent, to),
            (mint.distributed.irecv, received, source),
        ]
        ordered = posts if sends_first else posts[::-1]
        handles = [post(tensor, peer, group) for post, tensor, peer in ordered if tensor is not None]
        return PendingExchange(handles, sent, received)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)(tensor)

    def gather(self, words: IntArray) -> IntArray:
        """Return [size, words] int32: each rank's words."""
        mine = Tensor(words.astype(np.int32))
        gathered = ops.AllGather(GlobalComm.WORLD_COMM_GROUP)(mine).asnumpy()
        table: IntArray = gathered.reshape(self.size, len(words)).astype(np.int64)
        return table


def join() -> MindSporeRanks:
    """Join the job that msrun started. In msrun's scheduler process this does not return before the job is over."""
    if "MS_ROLE" not in os.environ:
        raise RunError("this process is not a rank of a MindSpore job; start it with 'fcp launch --launcher msrun'")
    if not GlobalComm.INITED:
        communication.init()
    _bind_default_group()
    ranks = MindSporeRanks(communication.get_rank(), communication.get_group_size())
    if ranks.size > 1:
        communication.create_group(_RING_GROUP, list(range(ranks.size)))
        # The first operation of a communicator is one of all ranks; afterwards any of them may talk.
        ops.AllReduce(ops.ReduceOp.SUM, _RING_GROUP)(Tensor([0], mindspore.float32))
    return ranks


def _bind_default_group() -> None:
    """Make `isend` find this process's rank on a CPU.

    MindSpore 2.10 binds the world group's name as a default argument while it is imported, before the back end (and
    with it the name) is known: without this, `isend` looks for HCCL's group on a CPU and fails.
    """
    lookup = getattr(mint.distributed.distributed, "get_cache_group_rank", None)
    if lookup is not None and lookup.__defaults__:
        lookup.__defaults__ = (GlobalComm.WORLD_COMM_GROUP,)
