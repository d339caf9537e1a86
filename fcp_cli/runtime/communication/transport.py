"""Exchange keys, values and their gradients between the members of a ring.

A hop is one batch of at most one send and one receive, between global ranks. Everything uses one communicator of all
ranks, so groups of any ranks are free to create: a plan changes groups with every micro-batch, and an NCCL or HCCL
communicator takes seconds and hundreds of megabytes.

Deadlock freedom: NCCL and HCCL run a rank's operations on one communicator in issue order, and a send blocks until its
receive is posted. All ranks issue their hops in the plan's order, each hop's send and receive as one batch, and
messages between two ranks arrive in the order they were sent. `verification/order.py` proves the order of a recorded
run.
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
    """Run a pass over a real transport, waiting for each handle it yields."""
    while True:
        try:
            handle = next(pass_)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        handle.wait()


class Transport(Protocol):
    """Point-to-point messages of one rank."""

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        """Start one hop.

        Args:
            kind: message name for records and errors, e.g. "kv", "dkv", "kv+dkv" or "rows".
            send: contiguous tensor for global rank `to`, or None.
            receive: contiguous tensor to fill from global rank `source`, or None.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupChannel:
    """Messages between the members of one group, addressed by index. Indices wrap around: -1 is the last member.

    Attributes:
        ranks: global ranks of the members, in order.
        index: index of this member.
        transport: transport of the messages; may be None if none are sent.
    """

    ranks: tuple[int, ...]
    index: int
    transport: Transport | None

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle | None:
        """Start one hop; see `Transport.start`. Return None if there is nothing to send or receive.

        Empty tensors are skipped: both ends know the sizes from the layout, and some back ends reject empty messages.
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
        """All-to-all: send a tensor to every other member, and receive one from each; yield the handles to wait for.

        In round j every member sends to the j-th after it and receives from the j-th before it: at most one send and
        one receive per batch, in the same order on all members.
        """
        # Issue all rounds before waiting: each has its own tensors, so none depends on another.
        under_way = []
        for distance in range(1, len(self.ranks)):
            to, source = ((self.index + step) % len(self.ranks) for step in (distance, -distance))
            send, receive = sent_to(to), received_from(source)
            if (handle := self.start(kind, send, to, receive, source)) is not None:
                under_way.append((handle, send))  # `send` must stay alive until it is sent
        for handle, _ in under_way:
            yield handle

    def gather(self, kind: str, own: Tensor) -> Waits[Tensor]:
        """All-gather tensors of equal size around the group: return [members, ...]."""
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
    """Ranks as processes, over one torch.distributed process group of all ranks.

    The group is reserved for hops: a collective of the script between two hops would break their order. Create it with
    `ProcessTransport.create`, on every rank. On CUDA under gloo, tensors are staged through pinned host memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        # gloo only sends host memory.
        self._staged = device.type != "cpu" and f"{device.type}:gloo" in dist.get_backend_config(group)

    @classmethod
    def create(cls, device: torch.device) -> ProcessTransport:
        """Create the group and connect all ranks. Every rank calls it once, before the first step.

        The first operation of a communicator must involve all ranks, hence the all-reduce. `connections` opens the peer
        connections for hops.
        """
        ranks = list(range(dist.get_world_size()))
        with warnings.catch_warnings():
            # torch warns that the timeout argument overrides that of the options, which is intended.
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
        """Return the process group of all ranks, for other ring implementations that address global ranks."""
        return self._group

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if self._staged:
            return _StagedHop(self._group, send, to, receive, source)
        return _Hop(_batch(self._group, send, to, receive, source))

    def meet(self, device: torch.device) -> None:
        """Run an all-reduce, which creates the communicator. Collective over the group."""
        dist.all_reduce(torch.zeros(1, device="cpu" if self._staged else device), group=self._group)

    def warm_up(self, device: torch.device) -> None:
        """Run an all-reduce, and one hop around the group as if it were one ring. Collective over the group."""
        self.meet(device)
        ranks = dist.get_process_group_ranks(self._group)
        place = ranks.index(dist.get_rank())
        if len(ranks) > 1:
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            self.start("warm-up", sent, ranks[(place + 1) % len(ranks)], received, ranks[place - 1]).wait()


def _priority_options(device: torch.device) -> Any:
    """Return options that let NCCL run hops ahead of queued compute kernels, or None for other back ends.

    A hop uses few multiprocessors, but behind a long kernel it would wait for the kernel's blocks to finish.
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
    """Hop through pinned host memory over gloo. For tests and rehearsals, not for speed."""

    def __init__(
        self, group: dist.ProcessGroup, send: Tensor | None, to: int, receive: Tensor | None, source: int
    ) -> None:
        self._receive = receive
        self._sent = None if send is None else _pinned_like(send).copy_(send)  # blocks until the copy is complete
        # Both tensors must stay alive until the hop ends, since gloo reads and writes them.
        self._received = None if receive is None else _pinned_like(receive)
        self._works = _batch(group, self._sent, to, self._received, source)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._receive is not None and self._received is not None:
            self._receive.copy_(self._received)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
