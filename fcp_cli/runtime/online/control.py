"""Messages between ranks for online planning: on a separate group, in host memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from fcp_cli.arrays import IntArray
from fcp_cli.errors import FcpError, RunError

_PATIENCE = timedelta(days=7)  # data may take long to arrive, which is not a hang


class Control(Protocol):
    """All ranks of a job, for online planning. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def from_rank(self, rank: int, message: bytes) -> bytes:
        """Broadcast the message of one rank."""
        ...

    def table(self, words: list[int]) -> IntArray:
        """All-gather words, equally many from each rank: [ranks, words]."""
        ...


class ProcessControl:
    """Ranks as processes of torch.distributed. Every rank creates it, in the same order as other groups."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="planning")

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def table(self, words: list[int]) -> IntArray:
        told = torch.zeros((self.size, len(words)), dtype=torch.int64, device="cpu")
        told[self.rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
        dist.all_reduce(told, group=self._group)
        return told.numpy()

    def from_rank(self, rank: int, message: bytes) -> bytes:
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        dist.broadcast(size, rank, group=self._group)
        content = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == rank:
            content.copy_(torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()))
        dist.broadcast(content, rank, group=self._group)
        return content.numpy().tobytes()


def on_rank_0(control: Control, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a function on rank 0; return its result, or raise its error, on all ranks. Every rank calls it."""
    told: dict[str, Any] = {}
    if control.rank == 0:
        try:
            told = {"found": run()}
        except FcpError as error:
            told = {"error": str(error)}
    told = json.loads(control.from_rank(0, json.dumps(told).encode()))
    if "error" in told:
        raise RunError(told["error"])
    found: dict[str, Any] = told["found"]
    return found
