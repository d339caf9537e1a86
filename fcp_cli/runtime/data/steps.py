"""Load a rank's steps ahead of the training loop, for any kind of shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.data.cursor import RankStep
from fcp_cli.runtime.layouts.layout import ShardLayout


class HostShard(Protocol):
    """One rank's shard of a micro-batch, in host memory.

    Attributes:
        member: this rank's index in the group.
        layout: tokens of each member.
    """

    @property
    def member(self) -> int: ...

    @property
    def layout(self) -> ShardLayout: ...

    def mapped(self: ShardT, function: Callable[[Tensor], Tensor]) -> ShardT:
        """Return the shard with `function` applied to every tensor that goes to the device."""
        ...


ShardT = TypeVar("ShardT", bound=HostShard)
Begin: TypeAlias = Callable[[MicroBatch, Sequence[MicroBatch]], Callable[[], ShardT]]
"""Begins to load a micro-batch, given all micro-batches of its wave, and returns the function that ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedStep(Generic[ShardT]):
    """One rank's shards of one step."""

    plan: RankStep
    shards: tuple[ShardT, ...]

    def pinned(self) -> LoadedStep[ShardT]:
        """Return the step in pinned memory, without which a copy to a GPU blocks the host."""
        return replace(self, shards=tuple(shard.mapped(Tensor.pin_memory) for shard in self.shards))


def load_steps(
    steps: Iterable[RankStep], begin: Begin[ShardT], *, device: torch.device, looks_ahead: bool = False
) -> Iterator[LoadedStep[ShardT]]:
    """Load a rank's shards step by step.

    Args:
        steps: steps to load.
        begin: starts to load a micro-batch; its errors are raised when the step would be yielded.
        device: device that the shards will be copied to; for CUDA they are pinned.
        looks_ahead: start the next step before the current one is finished, because other ranks read parts of it.
    """
    begun: deque[Callable[[], LoadedStep[ShardT]]] = deque()
    for step in steps:
        begun.append(_begin_step(step, begin, device))
        if len(begun) > 1 or not looks_ahead:
            yield begun.popleft()()
    yield from (finish() for finish in begun)


def _begin_step(step: RankStep, begin: Begin[ShardT], device: torch.device) -> Callable[[], LoadedStep[ShardT]]:
    try:
        waves = step.waves or [()] * len(step.rows)
        begun = [begin(row, wave) for row, wave in zip(step.rows, waves, strict=True)]
    except Exception as error:
        return partial(_raise, error)  # raised in its turn, after the previous steps
    return partial(_finish_step, step, begun, device)


def _raise(error: Exception) -> LoadedStep[ShardT]:
    raise error


def _finish_step(step: RankStep, begun: Sequence[Callable[[], ShardT]], device: torch.device) -> LoadedStep[ShardT]:
    loaded = LoadedStep(plan=step, shards=tuple(finish() for finish in begun))
    for shard in loaded.shards:
        # Computed in the loader's thread, so that the first layer's attention does not wait for it.
        ring, place = shard.layout.ring, shard.member // shard.layout.heads_degree
        for source in range(ring.degree):
            ring.hops(place, source, packed=device.type != "cpu")
    return loaded.pinned() if device.type == "cuda" else loaded
