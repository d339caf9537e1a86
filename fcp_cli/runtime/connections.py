"""Open the connections of all rings of a plan before the first step.

NCCL and HCCL connect two ranks at their first message, which blocks the host for up to 0.7 s (NVIDIA/nccl#1487) and
allocates device memory. Without this module that would happen during steps, as long as new pairs appear.

Pairs connect in rounds, in each of which a rank contacts at most one other rank. Every rank computes all rounds from
the plan and runs its own in order, waiting for each. This cannot deadlock: among unconnected pairs, those of the
earliest round only wait for each other.

Rings use each connection in one direction. Layers in which tokens look back (windows, linear attention) use both
directions, and some further connections (`plan.rings.halo_hops`). If any rank's model has such layers, as declared
by `expect_halo_pattern`, all ranks open these, too, before they follow the plan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Final, Literal

import torch

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.rings import halo_hops, ring_hops
from fcp_cli.plan.step import RingGroup, StepPlan
from fcp_cli.runtime.transport import Transport, World
from fcp_cli.util.words import counted, duration

_REPORT_SECONDS = 10.0

Hop = tuple[int, int]

# Connections of layers that look back: both directions of rings, or also those between tokens before a head exchange.
HaloPattern = Literal["no", "rings", "whole heads"]
_HALO_PATTERNS: Final[tuple[HaloPattern, ...]] = "no", "rings", "whole heads"
_expected: set[HaloPattern] = set()


def expect_halo_pattern(how: HaloPattern) -> None:
    """Declare how layers of this process's model look back; call it before `Session.steps`."""
    _expected.add(how)


def agree_on_halo_pattern(world: World) -> HaloPattern:
    """Return the widest halo pattern that any rank's model declared. Every rank calls it."""
    told = torch.tensor([how in _expected for how in _HALO_PATTERNS], dtype=torch.int64, device="cpu")
    world.start_sum(told).wait()
    # The last first, since each pattern includes the connections of those before it.
    return next((how for how, ranks in zip(_HALO_PATTERNS[:0:-1], told.tolist()[:0:-1], strict=True) if ranks), "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """One rank's connection in one round.

    Attributes:
        round: index of the round.
        peer: the other rank.
        sends, receives: directions in which rings will use the connection.
    """

    round: int
    peer: int
    sends: bool
    receives: bool


def planned_hops(plan: Path, *, halo_pattern: HaloPattern = "no") -> set[Hop]:
    """Return (from, to) of every message between ranks of a plan; reads the whole plan.

    If all ranks of a wave balance the encoder's work, these are all pairs.

    Args:
        plan: plan file.
        halo_pattern: halo exchanges to include.
    """
    reader = PlanReader(plan)
    if reader.metadata.encoder_balance is not None:
        return set(permutations(range(reader.metadata.num_ranks), 2))
    groups = {group for step in reader.steps() for group in step.ring_groups()}
    return hops_of(groups, reader.metadata.ranks_per_node, halo_pattern=halo_pattern)


def hops_of(groups: Iterable[RingGroup], ranks_per_node: int, *, halo_pattern: HaloPattern = "no") -> set[Hop]:
    """Return (from, to) of every message of groups, as given by `StepPlan.ring_groups`."""
    kinds: list[Callable[..., list[Hop]]] = [ring_hops]
    if halo_pattern != "no":
        kinds.append(partial(halo_hops, whole_heads=halo_pattern == "whole heads"))
    return {
        hop for group in set(groups) for hops in kinds for hop in hops(group.ranks, ranks_per_node, group.heads_degree)
    }


def rounds_of(hops: Iterable[Hop]) -> Mapping[Hop, int]:
    """Return the round of each pair (lower rank first): the earliest in which both ranks are free.

    With at most P peers per rank there are fewer than 2 P rounds.
    """
    busy: dict[int, set[int]] = {}
    rounds: dict[Hop, int] = {}
    for pair in sorted({(min(hop), max(hop)) for hop in hops}):
        taken = busy.setdefault(pair[0], set()) | busy.setdefault(pair[1], set())
        # One candidate more than taken rounds, so at least one is free.
        rounds[pair] = next(number for number in range(len(taken) + 1) if number not in taken)
        for rank in pair:
            busy[rank].add(rounds[pair])
    return rounds


def contacts_of(rank: int, hops: set[Hop]) -> list[Contact]:
    """Return the connections of a rank, round by round."""
    contacts = []
    for pair, number in rounds_of(hops).items():
        if rank in pair:
            peer = pair[0] if rank == pair[1] else pair[1]
            way_out, way_in = (rank, peer) in hops, (peer, rank) in hops
            contacts.append(Contact(round=number, peer=peer, sends=way_out, receives=way_in))
    return sorted(contacts, key=lambda contact: contact.round)


class Connections:
    """Open peer connections of a rank.

    The connections of a plan are opened before its first step, those of a stream before the first step that uses them.
    They are opened between steps, in rounds: otherwise a rank could wait for a connection inside one ring while another
    waits for it in the next.

    Args:
        transport: transport of the rings.
        rank: rank in the plan.
        device: device of the messages.
        peers: process of each rank of the plan within this process's tensor- and pipeline-parallel position; None if
            rank r is process r.

    Attributes:
        halo_pattern: halo exchanges of the model's layers.
        peers_met: number of contacts; a peer counts again if a direction is opened later.
    """

    def __init__(
        self, transport: Transport, *, rank: int, device: torch.device, peers: tuple[int, ...] | None = None
    ) -> None:
        self._transport, self._rank, self._device, self._peers = transport, rank, device, peers
        self._met: set[Hop] = set()
        self.halo_pattern: HaloPattern = "no"
        self.peers_met = 0

    def open_for(self, step: StepPlan, ranks_per_node: int) -> None:
        """Open the connections that a step is the first to use. Every rank calls it, before the step."""
        self.open_all(hops_of(step.ring_groups(), ranks_per_node, halo_pattern=self.halo_pattern))

    def open_all(self, hops: set[Hop], *, report: Callable[[str], None] | None = None) -> None:
        """Send one number over each new connection. Every rank calls it, with the same hops.

        Args:
            hops: (from, to) pairs, e.g. of `planned_hops`.
            report: receives a progress line every ten seconds, and one at the end, or None.
        """
        new = hops - self._met
        if not new:
            return
        self._met |= new
        contacts = contacts_of(self._rank, new)
        self.peers_met += len(contacts)
        started = reported = time.monotonic()
        for done, contact in enumerate(contacts):
            process = contact.peer if self._peers is None else self._peers[contact.peer]
            sent = torch.zeros(1, device=self._device) if contact.sends else None
            received = torch.empty(1, device=self._device) if contact.receives else None
            self._transport.start("contact", sent, process, received, process).wait()
            if report is not None and time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                report(f"connecting ranks: {done + 1} of {len(contacts)} peers of rank {self._rank}")
        if self._device.type != "cpu":
            # On a device `wait` only enqueues: connections are open once the device has finished.
            torch.get_device_module(self._device).synchronize(self._device)
        if report is not None:
            pairs = counted(len({frozenset(hop) for hop in new}), "pair")
            rounds = counted(1 + max(rounds_of(new).values()), "round")
            taken = duration(time.monotonic() - started)
            report(f"connected {pairs} of ranks in {rounds}, {taken} on rank {self._rank}")


def report_to_stderr(rank: int, device: torch.device) -> Callable[[str], None] | None:
    """Return a progress printer for rank 0 of a job on accelerators, else None: on CPUs connecting takes no time."""
    if rank or device.type == "cpu":
        return None
    return lambda line: print(f"fcp: {line}", file=sys.stderr, flush=True)
