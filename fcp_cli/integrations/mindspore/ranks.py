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

# One group of all ranks for hops only; any two ranks may exchange in it, so rings need no groups.
_RING_GROUP = "fcp-rings"


class PendingExchange:
    """A pending hop; keeps its tensors alive until it completes."""

    __slots__ = ("_handles", "_received", "_sent")

    def __init__(self, handles: Sequence[Any], sent: Tensor | None, received: Tensor | None) -> None:
        self._handles = handles
        self._sent = sent
        self._received = received

    def wait(self) -> Tensor | None:
        """Wait, and return the received tensor, or None."""
        for handle in self._handles:
            handle.wait()
        return self._received


class MindSporeRanks:
    """All ranks of a MindSpore job, created by `join`. Call collectives in the same order on all ranks."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(
        self, sent: Tensor | None, to: int, received: Tensor | None, source: int, *, sends_first: bool
    ) -> PendingExchange:
        """Start one hop: send a tensor to global rank `to`, and receive one from global rank `source`.

        Args:
            sent, received: contiguous tensors, or None for no message in that direction.
            sends_first: order of the two; neighbours must differ (odd members receive first), or a ring deadlocks if
                the back end's sends block until they are received.
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
    """Join the job that msrun started; in msrun's scheduler process, this returns only after the job."""
    if "MS_ROLE" not in os.environ:
        raise RunError("this process is not a rank of a MindSpore job; start it with 'fcp launch --launcher msrun'")
    if not GlobalComm.INITED:
        communication.init()
    _bind_default_group()
    ranks = MindSporeRanks(communication.get_rank(), communication.get_group_size())
    if ranks.size > 1:
        communication.create_group(_RING_GROUP, list(range(ranks.size)))
        # Initialize the communicator with a collective; point-to-point calls may follow.
        ops.AllReduce(ops.ReduceOp.SUM, _RING_GROUP)(Tensor([0], mindspore.float32))
    return ranks


def _bind_default_group() -> None:
    """Work around a bug of MindSpore 2.10, in which `isend` fails on CPUs.

    At import, before the back end is known, it binds the name of HCCL's world group as a default argument, which does
    not exist on CPUs.
    """
    lookup = getattr(mint.distributed.distributed, "get_cache_group_rank", None)
    if lookup is not None and lookup.__defaults__:
        lookup.__defaults__ = (GlobalComm.WORLD_COMM_GROUP,)
