"""Messages to rank 0 through the job's rendezvous store.

No rank waits for them, and they need no collective, so a loop may end at any point.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fcp_cli.runtime.metrics.message import RankMeasurement

# Number of messages kept per rank. Ranks are at most a step apart, since each step compares their inputs.
_SLOTS = 8


class MessageLostError(Exception):
    """A rank ran so far ahead that a later step's message overwrote that of this step."""


class MetricsMailbox:
    """Measurements of all ranks of a job, as messages in its store.

    Args:
        store: the store of torch.distributed.
        num_ranks: number of ranks that send messages.
        loop: number of the loop in the job; separates messages of loops with the same step numbers.
    """

    def __init__(self, store: Any, num_ranks: int, loop: int = 0) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore(f"fcp-metrics/{loop}", store)
        self._num_ranks = num_ranks
        self._step = -1  # step that is being collected
        self._found: dict[int, RankMeasurement] = {}

    def leave(self, rank: int, measured: RankMeasurement) -> None:
        """Send a rank's message to rank 0: a few packets without a reply."""
        self._store.set(_key(rank, measured.step), measured.encode())

    def collect(self, step: int) -> dict[int, RankMeasurement] | None:
        """Return all ranks' messages of a step, by rank, or None while one is missing. Steps come in order."""
        if step != self._step:
            self._step, self._found = step, {}
        missing = [rank for rank in range(self._num_ranks) if rank not in self._found]
        keys = [_key(rank, step) for rank in missing]
        if not self._store.check(keys):  # reading a missing key would block
            return None
        for rank, message in zip(missing, self._read(keys), strict=True):
            measured = RankMeasurement.decode(message)
            if measured.step > step:
                raise MessageLostError
            if measured.step == step:  # else the slot still holds an older step
                self._found[rank] = measured
        if len(self._found) < self._num_ranks:
            return None
        found, self._found = self._found, {}
        return dict(sorted(found.items()))

    def silent_ranks(self) -> list[int]:
        """Return the ranks whose message of the step being collected is missing."""
        return [rank for rank in range(self._num_ranks) if rank not in self._found and not self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        key = _key(rank, self._step)
        return bool(self._store.check([key])) and RankMeasurement.decode(self._store.get(key)).step == self._step

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            found: list[bytes] = self._store.multi_get(keys)
            return found
        return [self._store.get(key) for key in keys]


def _key(rank: int, step: int) -> str:
    return f"{rank}/{step % _SLOTS}"


def job_store() -> Any:
    """Return the store of torch.distributed's default process group, or None if this torch release hides it."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()
