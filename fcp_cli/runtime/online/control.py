"""Messages between the ranks of a job about its planning: on separate groups, in host memory."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from fcp_cli.arrays import IntArray
from fcp_cli.plan.metadata.planner_place import PlannerPlace

_PATIENCE = timedelta(days=7)  # data may take its time: that it does not come yet is no hang


class Control(Protocol):
    """All ranks of a job, as their planning needs them. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def plans(self) -> bool:
        """Whether this rank has a planning process."""
        ...

    def spread(self, message: bytes) -> bytes:
        """Return the message of the rank that plans for this one."""
        ...

    def from_rank(self, rank: int, message: bytes) -> bytes:
        """Return the message of one rank."""
        ...

    def table(self, words: list[int]) -> IntArray:
        """Return the messages of all ranks, [ranks, words], as many words each."""
        ...


class ProcessControl:
    """The processes of torch.distributed. Every rank makes it, in the same order as other groups."""

    def __init__(self, place: PlannerPlace) -> None:
        self._all = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="planning")
        per_node = self.size if place == "rank0" else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self._planner = self.rank - self.rank % per_node
        self._mates = self._all
        if per_node < self.size:
            for first in range(0, self.size, per_node):  # all ranks make all groups, in one order
                ranks = list(range(first, min(first + per_node, self.size)))
                group = dist.new_group(ranks, backend="gloo", timeout=_PATIENCE)
                if self.rank in ranks:
                    self._mates = group

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def plans(self) -> bool:
        return self.rank == self._planner

    def spread(self, message: bytes) -> bytes:
        return self._broadcast(message, self._planner, self._mates)

    def from_rank(self, rank: int, message: bytes) -> bytes:
        return self._broadcast(message, rank, self._all)

    def table(self, words: list[int]) -> IntArray:
        told = torch.zeros((self.size, len(words)), dtype=torch.int64, device="cpu")
        told[self.rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
        dist.all_reduce(told, group=self._all)
        return told.numpy()

    def _broadcast(self, message: bytes, source: int, group: dist.ProcessGroup | None) -> bytes:
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        dist.broadcast(size, source, group=group)
        content = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == source:
            content.copy_(torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()))
        dist.broadcast(content, source, group=group)
        return content.numpy().tobytes()
