"""Write down what a rank issues, for `order.check_order` to prove free of deadlocks."""

from __future__ import annotations

from torch import Tensor

from fcp_cli.runtime.transport import Handle, Transport
from fcp_cli.runtime.world import World
from fcp_cli.verification.order import Operation


class RecordingTransport:
    """A transport that passes hops on to another and writes them down, for `order.check_order`."""

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
        """Write down a collective that the training loop runs itself."""
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
    """A world that passes collectives on to another and writes them down beside the ring's operations."""

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

    def broadcast(self, tensor: Tensor) -> None:
        self._record.record_collective("broadcast", tensor)
        self._inner.broadcast(tensor)
