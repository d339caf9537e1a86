"""Times messages between ranks: selected pairs, growing sizes, and the cost of a first contact."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fcp_cli.profiling.workers.device import Stopwatch, free_bytes, wait_for_device
from fcp_cli.runtime.communication.transport import Transport

_KIB, _MIB = 1 << 10, 1 << 20
HOST_MOST_BYTES = 8 * _MIB  # on a host, the rate does not change above it
DEVICE_MOST_BYTES = 128 * _MIB
_LEAST_BYTES = 4 * _KIB  # small messages show the fixed cost, large ones the bandwidth
_SHARE_OF_FREE = 4  # each buffer takes at most 1/8 of the free memory
_CONTACT_BYTES = 4 * _KIB
_GROWTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PairKind:
    """A pattern of pairs: each rank sends to one rank and receives from another.

    Attributes:
        tier: `intra_node`, `inter_node` (equal local ranks: one rail), or `inter_node_cross_rail`, as in rings over
            parts of nodes.
        nodes, places: offset of the receiver in nodes and local ranks; both wrap around.
        ranks_per_node: ranks per node.
        world: number of ranks.
    """

    tier: str
    nodes: int
    places: int
    ranks_per_node: int
    world: int

    def to(self, rank: int) -> int:
        return self._shifted(rank, 1)

    def source(self, rank: int) -> int:
        return self._shifted(rank, -1)

    def _shifted(self, rank: int, sign: int) -> int:
        node, place = divmod(rank, self.ranks_per_node)
        num_nodes = self.world // self.ranks_per_node
        node = (node + sign * self.nodes) % num_nodes
        return node * self.ranks_per_node + (place + sign * self.places) % self.ranks_per_node


def links(world: int, ranks_per_node: int) -> list[PairKind]:
    """Return the pairs to time: inside a node, and between nodes on one rail and across rails."""
    shifts = {"intra_node": (0, 1), "inter_node": (1, 0), "inter_node_cross_rail": (1, 1)}
    return _possible(shifts, world, ranks_per_node)


def fresh_links(world: int, ranks_per_node: int) -> list[PairKind]:
    """Return pairs that a new transport's warm-up ring does not connect."""
    shifts = {"intra_node": (0, 2), "inter_node": (1, 1)}
    if ranks_per_node < 4:
        del shifts["intra_node"]  # with three ranks, an offset of 2 is an offset of -1
    return _possible(shifts, world, ranks_per_node)


def _possible(shifts: dict[str, tuple[int, int]], world: int, ranks_per_node: int) -> list[PairKind]:
    made = [
        PairKind(tier=tier, nodes=nodes, places=places, ranks_per_node=ranks_per_node, world=world)
        for tier, (nodes, places) in shifts.items()
    ]
    whole_nodes = world % ranks_per_node == 0
    return [
        link
        for link in made
        if (link.places == 0 or ranks_per_node > 1) and (link.nodes == 0 or (whole_nodes and world > ranks_per_node))
    ]


def most_message_bytes(device: torch.device) -> int:
    """Return the largest message size to time, so that two fit into free memory with room to spare."""
    most = HOST_MOST_BYTES if device.type == "cpu" else DEVICE_MOST_BYTES
    return max(_LEAST_BYTES, min(most, int(free_bytes(device) / (2 * _SHARE_OF_FREE))))


def message_sizes(most_bytes: int) -> list[int]:
    """Return the message sizes to time: 4 KiB, 64 KiB, 1 MiB, ..., and the largest."""
    sizes = [_LEAST_BYTES]
    while sizes[-1] * _GROWTH < most_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return [*sizes, most_bytes] if sizes[-1] < most_bytes else sizes


def gathered(values: Sequence[float]) -> list[list[float]]:
    """All-gather a list of values of equal length. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]


class Messenger:
    """Times messages over a transport; all methods are collective."""

    def __init__(self, transport: Transport, device: torch.device, stopwatch: Stopwatch) -> None:
        self._transport = transport
        self._device = device
        self._stopwatch = stopwatch

    def seconds(self, link: PairKind, num_bytes: int, *, repeats: int) -> list[float]:
        """Return message times [repeats], each from the least disturbed rank."""
        work = self._message(link, num_bytes)
        dist.barrier()  # otherwise a late rank would count as waiting on others
        everyone = gathered(self._stopwatch.measure_each(work, repeats, pause=dist.barrier))
        return [min(values) for values in zip(*everyone, strict=True)]

    def first_contact(self, link: PairKind) -> tuple[list[float], list[float] | None]:
        """Time the first message between unconnected pairs.

        Returns:
            Extra host seconds [ranks], and device bytes per new peer [ranks], or None on a CPU.
        """
        work = self._message(link, _CONTACT_BYTES)
        dist.barrier()
        before = free_bytes(self._device)
        first = self._host_seconds(work)
        after = free_bytes(self._device)
        again = self._host_seconds(work)
        rank = dist.get_rank()
        met = len({link.to(rank), link.source(rank)})
        everyone = gathered([max(0.0, first - again), max(0.0, before - after) / met])
        seconds, device_bytes = ([values[column] for values in everyone] for column in (0, 1))
        return seconds, None if self._device.type == "cpu" else device_bytes

    def _host_seconds(self, work: Callable[[], None]) -> float:
        wait_for_device(self._device)
        begin = time.perf_counter()
        work()
        wait_for_device(self._device)
        return time.perf_counter() - begin

    def _message(self, link: PairKind, num_bytes: int) -> Callable[[], None]:
        rank = dist.get_rank()
        send = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        receive = torch.empty_like(send)

        def exchange() -> None:
            self._transport.start("kv", send, link.to(rank), receive, link.source(rank)).wait()

        return exchange
