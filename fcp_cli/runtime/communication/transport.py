"""Exchange keys, values and their gradients between the members of a ring.

A hop is one batch of at most one send and one receive, to and from global ranks. Everything runs over one
communicator of all ranks, so a group of any ranks costs nothing to make: a plan changes groups with every
micro-batch, and a communicator of NCCL or HCCL takes seconds and hundreds of megabytes.

Why this cannot deadlock: NCCL and HCCL run a rank's operations on one communicator in the order of their issue, and a
send blocks until its receive is posted. All ranks issue their hops in the plan's order, each hop's send and receive
as one batch, and messages between two ranks arrive in the order they were sent. `verification/order.py` proves the
order of a recorded run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli.runtime.communication.world import Waitable, rank_timeout

Result = TypeVar("Result")


Handle: TypeAlias = Waitable
"""A hop under way. Neither of its tensors may be touched before `wait` has returned (on a GPU: is enqueued)."""

Waits = Generator[Handle, None, Result]
"""A pass over a transport, written as a generator that yields each handle it must wait for."""


def drive(pass_: Waits[Result]) -> Result:
    """Run a pass over a real transport: wait wherever it waits."""
    while True:
        try:
            handle = next(pass_)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        handle.wait()


class Transport(Protocol):
    """Carries the hops of one rank."""

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        """Start one hop.

        Args:
            kind: name of the message ("kv", "dkv", "kv+dkv", "rows" or "drows"), for records and errors.
            send: contiguous tensor for global rank `to`, or None.
            receive: contiguous tensor to fill from global rank `source`, or None.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupChannel:
    """Messages between the members of one group, by their places in it. Places wrap around: -1 is the last member.

    Attributes:
        ranks: global ranks of the members, in order.
        index: place of this member.
        transport: carries the messages; None is enough if none is sent.
    """

    ranks: tuple[int, ...]
    index: int
    transport: Transport | None

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle | None:
        """Start one hop, as `Transport.start` does; return None if nothing travels.

        Empty tensors are not sent: both ends know the sizes from the layout, and some back ends reject empty messages.
        """
        send = send if send is not None and send.numel() else None
        receive = receive if receive is not None and receive.numel() else None
        if send is None and receive is None:
            return None
        assert self.transport is not None, "a group of several members needs a transport"
        size = len(self.ranks)
        return self.transport.start(kind, send, self.ranks[to % size], receive, self.ranks[source % size])

    def exchange(
        self, kind: str, sent_to: Callable[[int], Tensor], received_from: Callable[[int], Tensor]
    ) -> Waits[None]:
        """Send every other member its tensor, and receive one from each; yield the handles it waits for.

        In round j every member sends to the j-th after it and receives from the j-th before it: at most one send and
        one receive per batch, the same rounds in the same order on all members.
        """
        # All rounds are issued before the first is waited for: each has tensors of its own, so none needs another.
        under_way = []
        for distance in range(1, len(self.ranks)):
            to, source = ((self.index + step) % len(self.ranks) for step in (distance, -distance))
            send, receive = sent_to(to), received_from(source)
            if (handle := self.start(kind, send, to, receive, source)) is not None:
                under_way.append((handle, send))  # which must live until it has left
        for handle, _ in under_way:
            yield handle

    def gather(self, kind: str, own: Tensor) -> Waits[Tensor]:
        """Return [members, ...] the equally large tensors of all members, each passed on around the group."""
        size = len(self.ranks)
        held = own.new_empty(size, *own.shape)
        held[self.index] = own
        for hop in range(size - 1):
            sent, arriving = (self.index - hop) % size, (self.index - hop - 1) % size
            handle = self.start(kind, held[sent], self.index + 1, held[arriving], self.index - 1)
            if handle is not None:
                yield handle
        return held


class ProcessTransport:
    """Ranks as processes over torch.distributed: one process group of all ranks, which has run one collective.

    Nothing else runs on the group: a collective of the script between two hops would take part in their order. Make it
    with `ProcessTransport.create`, on every rank. CUDA tensors under gloo are staged through pinned host memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        # gloo sends host memory only.
        self._staged = device.type != "cpu" and f"{device.type}:gloo" in dist.get_backend_config(group)

    @classmethod
    def create(cls, device: torch.device) -> ProcessTransport:
        """Make the group and let all ranks meet. Every rank of the default group calls it, once, before the first step.
        The first operation of a communicator must not involve only some of its ranks, so a reduction over all runs
        here; afterwards any ranks may talk. `connections` opens the ways that they use.
        """
        ranks = list(range(dist.get_world_size()))
        with warnings.catch_warnings():
            # The options' own time-out would override the group's.
            warnings.filterwarnings("ignore", message=".*_timeout was specified")
            group = dist.new_group(
                ranks, group_desc="rings", timeout=rank_timeout(), pg_options=_priority_options(device)
            )
        assert group is not None
        transport = cls(group, device)
        transport.meet(device)
        return transport

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of all ranks, for other implementations of rings that name global ranks."""
        return self._group

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if self._staged:
            return _StagedHop(self._group, send, to, receive, source)
        return _Hop(_batch(self._group, send, to, receive, source))

    def meet(self, device: torch.device) -> None:
        """Run a reduction, for which the communicator is made. Collective over the group."""
        dist.all_reduce(torch.zeros(1, device="cpu" if self._staged else device), group=self._group)

    def warm_up(self, device: torch.device) -> None:
        """Run a reduction and one hop around the group, if all of it is one ring. Collective over it."""
        self.meet(device)
        ranks = dist.get_process_group_ranks(self._group)
        place = ranks.index(dist.get_rank())
        if len(ranks) > 1:
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            self.start("warm-up", sent, ranks[(place + 1) % len(ranks)], received, ranks[place - 1]).wait()


def _priority_options(device: torch.device) -> Any:
    """Return options by which NCCL runs hops ahead of compute that was queued before them; None for other back ends.

    A hop takes few of the multiprocessors; behind the blocks of a long kernel it would wait for them to finish.
    """
    if f"{device.type}:nccl" not in dist.get_backend_config():
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _batch(group: dist.ProcessGroup, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> list[Any]:
    operations = []
    if send is not None:
        operations.append(dist.P2POp(dist.isend, send, to, group))
    if receive is not None:
        operations.append(dist.P2POp(dist.irecv, receive, source, group))
    works: list[Any] = dist.batch_isend_irecv(operations)
    return works


class _Hop:
    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _StagedHop:
    """A hop from device to pinned host, over gloo, and back. For tests and rehearsals, not for speed."""

    def __init__(
        self, group: dist.ProcessGroup, send: Tensor | None, to: int, receive: Tensor | None, source: int
    ) -> None:
        self._receive = receive
        self._sent = None if send is None else _pinned_like(send).copy_(send)  # blocks until the copy is complete
        # Both are kept until the hop ends: gloo reads and writes them meanwhile.
        self._received = None if receive is None else _pinned_like(receive)
        self._works = _batch(group, self._sent, to, self._received, source)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._receive is not None and self._received is not None:
            self._receive.copy_(self._received)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
