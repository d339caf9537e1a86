"""Messages between ranks: collectives of all of them (`World`), and hops between members of a group (`Transport`).

A hop is one batch of at most one send and one receive, between global ranks. Everything uses one communicator of all
ranks, so groups of any ranks are free to create: a plan changes groups with every micro-batch, and an NCCL or HCCL
communicator takes seconds and hundreds of megabytes.

Deadlock freedom: NCCL and HCCL run a rank's operations on one communicator in issue order, and a send blocks until its
receive is posted. All ranks issue their hops in the plan's order, each hop's send and receive as one batch, and
messages between two ranks arrive in the order they were sent. `verification/order.py` proves the order of a recorded
run.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.launcher import await_store, end_with_launcher

# Timeout of operations between ranks in seconds; set by `fcp launch --rank-timeout`.
_TIMEOUT_VARIABLE = "FCP_RANK_TIMEOUT"
_CPU_SECONDS, _DEVICE_SECONDS = 1800, 600  # its defaults
# Rendezvous timeout of msrun's ranks in seconds; msrun sets it for them.
_MSRUN_SECONDS = "MS_TOPO_TIMEOUT"


class Waitable(Protocol):
    def wait(self) -> object: ...


class World(Protocol):
    """All ranks of a job. Every rank calls the same methods in the same order. Tensors are changed in place."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def start_all_reduce(self, tensor: Tensor) -> Waitable:
        """Start `all_reduce_sum`; on an accelerator, waiting for it holds up the current stream, not the host."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to all ranks."""
        ...

    def start_sum(self, tensor: Tensor) -> Waitable:
        """Start an asynchronous all-reduce of a tensor in host memory."""
        ...

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        """Send the host tensor `told` to rank `to`, and receive `heard` from rank `source`."""
        ...


class ProcessWorld:
    """The default process group of torch.distributed."""

    def __init__(self) -> None:
        self._host_group: dist.ProcessGroup | None = None  # None: the default group

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def start_all_reduce(self, tensor: Tensor) -> Waitable:
        work: Waitable = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True)
        return work

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def start_sum(self, tensor: Tensor) -> Waitable:
        work: Waitable = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._hosts(), async_op=True)
        return work

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        group = self._hosts()  # separate from the group of the rings' hops
        both = [dist.P2POp(dist.isend, told, to, group), dist.P2POp(dist.irecv, heard, source, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _hosts(self) -> dist.ProcessGroup | None:
        """Return the group for host tensors; collective at its first call, which may create it."""
        backends = dist.get_backend_config()
        if self._host_group is None and "cpu:" not in backends and any(kind in backends for kind in ("nccl", "hccl")):
            # The script's group has no back end for host tensors.
            self._host_group = dist.new_group(backend="gloo", timeout=rank_timeout(local_device()))
        return self._host_group


def gather_rows(world: World, own: Tensor, device: torch.device | None = None) -> list[Tensor]:
    """All-gather tensors [n, ...] of possibly different n. Every rank calls it.

    Implemented as an all-reduce of zeros into which each rank writes its own rows.

    Args:
        world: all ranks.
        own: this rank's tensor.
        device: device of the collectives, or None for host tensors.
    """
    counts = [count for (count,) in gather_words(world, (len(own),), device)]
    begin = sum(counts[: world.rank])
    told = torch.zeros((sum(counts), *own.shape[1:]), dtype=own.dtype, device="cpu" if device is None else device)
    told[begin : begin + len(own)] = own
    # The condition is the same on all ranks, so none hangs.
    if len(told):
        _sum(world, told, device)
    return list(torch.split(told, counts))


def gather_words(world: World, own: Sequence[int], device: torch.device | None = None) -> list[list[int]]:
    """All-gather numbers, equally many from each rank. Every rank calls it.

    Args:
        world: all ranks.
        own: this rank's numbers; with a device, they must fit int32, which every back end supports.
        device: device of the collectives, or None for host tensors.
    """
    # An explicit device, since the script may have set a default device.
    dtype, place = (torch.int64, torch.device("cpu")) if device is None else (torch.int32, device)
    told = torch.zeros((world.size, len(own)), dtype=dtype, device=place)
    told[world.rank] = torch.tensor(own, dtype=dtype, device=place)
    _sum(world, told, device)
    found: list[list[int]] = told.tolist()
    return found


def _sum(world: World, told: Tensor, device: torch.device | None) -> None:
    if device is None:
        world.start_sum(told).wait()
    else:
        world.all_reduce_sum(told)


def gather_texts(world: World, text: str) -> list[str]:
    """All-gather texts through host tensors."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    return [told.numpy().tobytes().decode() for told in gather_rows(world, own)]


def _msrun_store(rank: int, size: int, seconds: int) -> Any:
    """Return the rendezvous store of ranks started by msrun which, unlike torchrun, does not join nodes first."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = torch._C._distributed_c10d.TCPStore(
            host, port, size, is_master=rank == 0, timeout=timedelta(seconds=seconds)
        )
    except RuntimeError as error:
        raise RunError(
            f"the ranks did not come together at {host}:{port} within {seconds} s; start all nodes with the same plan, "
            "make sure that --master-addr and --master-port are node 0's own, or wait longer with --join-timeout"
        ) from error
    store.set_timeout(dist.default_pg_timeout)  # the timeout above was for joining only
    return store


def local_device() -> torch.device:
    """Return this process's device: the local rank's CUDA or NPU device if there is one, else the CPU.

    If the script has already initialised torch.distributed with gloo, it is the CPU.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, local_rank)
    return torch.device("cpu")


def rank_timeout(device: torch.device) -> timedelta:
    """Return the timeout of operations between ranks: FCP_RANK_TIMEOUT, else 10 minutes, 30 on CPUs.

    Every group that fcp creates is given it: torch's default depends on how its back end is written, and is 10 minutes
    for "nccl" but 30 for "cpu:gloo,cuda:nccl".
    """
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return timedelta(seconds=_CPU_SECONDS if device.type == "cpu" else _DEVICE_SECONDS)
    if not text.isdecimal() or not int(text):
        raise RunError(f"{_TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds, 1 or more")
    return timedelta(seconds=int(text))


def join_process_group(device: torch.device) -> bool:
    """Initialise torch.distributed unless the script has; return whether it was initialised here.

    Without torchrun's environment variables the process is the only rank.
    """
    end_with_launcher()
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        # Before the group is created: NCCL and HCCL communicators are bound to the current device.
        torch.get_device_module(device).set_device(device)
    # Always include gloo, for messages from host memory.
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device.type]
    # With device_id, NCCL creates the communicator eagerly, and barriers know their device.
    bound = device if device.type == "cuda" and device.index is not None else None
    timeout = rank_timeout(device)
    given: dict[str, Any] = {"timeout": timeout, "device_id": bound}
    if "RANK" in os.environ and _MSRUN_SECONDS in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _msrun_store(rank, size, int(os.environ[_MSRUN_SECONDS]))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **given)
    elif "RANK" in os.environ:
        await_store(os.environ)
        dist.init_process_group(backend, **given)
    else:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    atexit.register(leave_process_group)
    return True


def leave_process_group() -> None:
    """Destroy the remaining process groups when a script has ended, before the interpreter exits.

    Gloo's threads may still hold a tensor of the last collective, and a thread that needs Python during finalization
    aborts the process: a finished job would fail. After an exception nothing is destroyed: a collective may never
    complete, and the job fails in any case.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


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


class BufferPool:
    """Memory of a rank's ring messages, lent to one pass after another.

    A back end holds the tensors of a message until the device has sent or received it, while the host runs layers
    ahead. So buffers allocated by each pass would add up. A pass returns its buffers after its last wait: whatever
    writes to them next runs later on the same stream.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def lend(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer of at least `num_bytes` bytes, of any content."""
        free = self._free.setdefault(_stream_of(device), [])
        if free and free[-1].numel() >= num_bytes:
            return free.pop()
        del free[-1:]  # too small: freed before its successor is allocated
        with torch.inference_mode(False):  # training may use it next
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def take_back(self, *buffers: Tensor) -> None:
        """Accept buffers whose last message has been waited for."""
        self._free[_stream_of(buffers[0].device)] += buffers


def _stream_of(device: torch.device) -> Any:
    """Return the stream that kernels are launched on now, as a key; None on devices without streams."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return None if module is None or not module.is_available() else module.current_stream(device)


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
                ranks, group_desc="rings", timeout=rank_timeout(device), pg_options=_priority_options(device)
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
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
