"""Records the operations that a rank issues, for `order.check_order`.

For ranks that are processes, `ProcessRecorder.register` adds a back end to torch.distributed. Its groups forward each
operation to gloo and record it and the wait for it, whoever issues it: rings, exchanges, DDP's reducer, FSDP2,
barriers, the script. Ranks that are threads have no process group, so their transport and world are wrapped instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli.runtime.transport import Handle, Transport, Waitable, World
from fcp_cli.verification.order import NEVER, RECEIVE, SEND, Operation

BACKEND = "fcp-recorded"
"""Name of the back end in torch.distributed."""

_C10D: Any = torch._C._distributed_c10d
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier", "gather", "scatter",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single",
)  # fmt: skip
# Sizes of these may differ between ranks.
_OF_ANY_SIZE = {"alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"}


class ProcessRecorder:
    """Records the operations of a process: `register` it, and pass `BACKEND` to `init_process_group`.

    Attributes:
        groups: global ranks of each group of this process, by group name.
        content: content of the messages being issued ("kv", ...); set by `LabellingTransport`.
    """

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, ...]] = {}
        self.content = ""
        self._issued: list[Operation] = []
        self._waited: dict[int, int] = {}
        self._batches = 0
        self._lock = threading.RLock()  # on accelerators, autograd issues operations from its own threads

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations issued so far, in order."""
        with self._lock:
            return tuple(replace(issued, waited=self._waited.get(issued.batch, NEVER)) for issued in self._issued)

    def register(self, name: str = BACKEND) -> None:
        """Register the back end, and patch torch.distributed to signal the start and end of message batches.

        Torch signals these only to its own back ends, so `batch_isend_irecv` is replaced for the life of the process.
        """
        dist.Backend.register_backend(name, self.make_group, extended_api=True, devices=["cpu"])
        c10d: Any = dist.distributed_c10d
        torch_distributed: Any = dist
        original = dist.batch_isend_irecv

        def batched(operations: list[dist.P2POp]) -> list[dist.Work]:
            group: Any = operations[0].group or dist.group.WORLD
            if not isinstance(group, RecordedGroup):
                return original(operations)
            with group.batch():
                return original(operations)

        torch_distributed.batch_isend_irecv = c10d.batch_isend_irecv = batched

    def make_group(self, options: Any, _: Any) -> RecordedGroup:
        """Create a process group; called by torch.distributed with its `_DistributedBackendOptions`."""
        return RecordedGroup(self, options)

    def issue(self, operations: Sequence[Operation]) -> int:
        """Record a batch; return its index."""
        with self._lock:
            number = self._batches
            self._issued += [replace(operation, batch=number) for operation in operations]
            self._batches += 1
            return number

    def waited(self, batch: int) -> None:
        """Record that the rank waited for a batch before issuing another one."""
        with self._lock:
            self._waited.setdefault(batch, self._batches)


class RecordedGroup(dist.ProcessGroup):
    """A recorded process group over gloo. It is a Python class that C++ code (DDP's reducer) calls, too."""

    def __init__(self, recorder: ProcessRecorder, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.recorder = recorder
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.id = options.group_id
        self.store = options.store
        self.inner = _gloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._open: list[tuple[Operation, Callable[[], dist.Work], RecordedWork]] | None = None

    @property
    def label(self) -> str:
        """Name of the group for messages; equal on all its ranks."""
        described = getattr(self, "group_desc", "")
        if described == "default_pg":
            return "world"
        return f"group {self.id}" if described in ("", "undefined") else f"{described} ({self.id})"

    @property
    def group_name(self) -> Any:  # torch names only its own groups
        return self.id

    def rank(self) -> int:
        return int(self.inner.rank())

    def size(self) -> int:
        return int(self.inner.size())

    def getBackendName(self) -> str:
        return BACKEND

    def collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Issue a collective by method name."""
        size = 0 if name in _OF_ANY_SIZE else _num_bytes(args)
        operation = Operation(group=self.label, verb=name.strip("_"), batch=0, num_bytes=size)
        work = self.new_work()
        self._flush([(operation, lambda: getattr(self.inner, name)(*args, **kwargs), work)])
        return work

    def new_work(self) -> RecordedWork:
        return RecordedWork(self.recorder)

    def message(self, verb: str, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Issue a send or receive, immediately or with the open batch."""
        operation = Operation(
            group=self.label,
            verb=verb,
            batch=0,
            peer=self.ranks[peer],
            num_bytes=_num_bytes(tensors),
            shape=tuple(tensors[0].shape),
            content=self.recorder.content,
        )
        method = getattr(self.inner, verb)
        work = self.new_work()
        issued = (operation, lambda: method(tensors, peer, tag), work)
        if self._open is None:
            self._flush([issued])
        else:
            self._open.append(issued)
        return work

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        return self.message(SEND, tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        return self.message(RECEIVE, tensors, srcRank, tag)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager that issues its messages as one batch."""
        self._open = []
        try:
            yield
        finally:
            issued, self._open = self._open, None
            self._flush(issued)

    def _flush(self, issued: list[tuple[Operation, Callable[[], dist.Work], RecordedWork]]) -> None:
        self.recorder.groups.setdefault(self.label, self.ranks)
        number = self.recorder.issue([operation for operation, _, _ in issued])
        for _, _, work in issued:
            work.number = number
        self.start(number, issued)

    def start(self, number: int, issued: list[tuple[Operation, Callable[[], dist.Work], RecordedWork]]) -> None:
        """Start a batch that has been recorded."""
        for _, start, work in issued:
            work.started(start())


class RecordedWork(dist.Work):
    """Handle of a recorded operation; records and forwards waits."""

    def __init__(self, recorder: ProcessRecorder) -> None:
        super().__init__()
        self.number = -1
        self._recorder = recorder
        self._inner: Any = None

    def started(self, inner: dist.Work) -> None:
        self._inner = inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._recorder.waited(self.number)
        return bool(self._inner.wait(timeout))

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def result(self) -> Any:
        return self._inner.result()

    def get_future(self) -> Any:
        return self._inner.get_future()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a plain gloo group."""
    group = _C10D.ProcessGroup(store, rank, size)
    kind = _C10D.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, _C10D.ProcessGroupGloo(store, rank, size, timeout=timeout))
    return group


def _num_bytes(value: Any) -> int:
    """Return the total bytes of all tensors in (nested lists of) arguments."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _collective(name: str) -> Callable[..., dist.Work]:
    def method(self: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self.collective(name, args, kwargs)

    return method


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):  # available names depend on the torch version
        setattr(RecordedGroup, _name, _collective(_name))


class LabellingTransport:
    """Transport wrapper that labels hops for a recorder."""

    def __init__(self, inner: Transport, recorder: ProcessRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        self._recorder.content = kind
        try:
            return self._inner.start(kind, send, to, receive, source)
        finally:
            self._recorder.content = ""


class RecordingTransport:
    """Transport wrapper that records hops, for `order.check_order`."""

    def __init__(self, inner: Transport, group: str = "ring") -> None:
        self._inner = inner
        self._group = group
        self._batches = 0
        self.operations: list[Operation] = []

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        for verb, tensor, peer in (("send", send, to), ("recv", receive, source)):
            if tensor is not None:
                self._record(verb, peer, tensor, kind)
        self._batches += 1
        return self._inner.start(kind, send, to, receive, source)

    def record_collective(self, name: str, tensor: Tensor, group: str = "world") -> None:
        """Record a collective that the training loop runs itself."""
        self._record(name, -1, tensor, "collective", group)
        self._batches += 1

    def _record(self, verb: str, peer: int, tensor: Tensor, content: str, group: str | None = None) -> None:
        self.operations.append(
            Operation(
                group=group or self._group,
                verb=verb,
                batch=self._batches,
                peer=peer,
                num_bytes=tensor.numel() * tensor.element_size(),
                shape=tuple(tensor.shape),
                content=content,
            )
        )


class RecordingWorld:
    """World wrapper that records collectives together with the ring's operations."""

    def __init__(self, inner: World, record: RecordingTransport) -> None:
        self._inner = inner
        self._record = record

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._record.record_collective("all_reduce", tensor)
        self._inner.all_reduce_sum(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Waitable:
        self._record.record_collective("all_reduce", tensor)
        return self._inner.start_all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        self._record.record_collective("broadcast", tensor)
        self._inner.broadcast(tensor)

    def start_sum(self, tensor: Tensor) -> Waitable:
        return self._inner.start_sum(tensor)  # runs between hosts, outside device queues

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        self._inner.swap(told, to, heard, source)
