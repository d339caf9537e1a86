"""Open the connections of all rings of a plan before the first step.

NCCL and HCCL connect two ranks at their first message, with the host blocked for up to 0.7 s (NVIDIA/nccl#1487), and
take device memory for it. Left to the rings, that would happen in the middle of steps, for as long as new pairs appear.

Pairs are contacted in rounds, in each of which a rank meets one other rank at most. Every rank works out all rounds
from the plan and goes through its own in order, waiting for each. This cannot deadlock: of the pairs that are not
connected, those of the earliest round wait only for each other.

Rings use each way of theirs in one direction. Layers in which tokens look back (windows, linear attention) use them in
both, and some others (`plan.ring_order.halo_hops`): where a rank's model has such layers, as who hooks it knows
(`expect_halo_pattern`), all ranks open these ways, too, once they are about to follow the plan.
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

from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.ring_order import halo_hops, ring_hops
from fcp_cli.plan.step import RingGroup, StepPlan
from fcp_cli.runtime.communication.transport import Transport
from fcp_cli.runtime.communication.world import World
from fcp_cli.words import counted, duration

_REPORT_SECONDS = 10.0

Hop = tuple[int, int]

# How layers look back: up and down rings, and before ranks have exchanged tokens for heads.
HaloPattern = Literal["no", "rings", "whole heads"]
_HALO_PATTERNS: Final[tuple[HaloPattern, ...]] = "no", "rings", "whole heads"
_expected: set[HaloPattern] = set()


def expect_halo_pattern(how: HaloPattern) -> None:
    """Say how layers of this process's model look back; before `Session.steps`."""
    _expected.add(how)


def agree_on_halo_pattern(world: World) -> HaloPattern:
    """Return how layers of any rank's model look back. Every rank calls it."""
    told = torch.tensor([how in _expected for how in _HALO_PATTERNS], dtype=torch.int64, device="cpu")
    world.start_sum(told).wait()
    # The last first, since each pattern opens all ways of those before it.
    return next((how for how, ranks in zip(_HALO_PATTERNS[:0:-1], told.tolist()[:0:-1], strict=True) if ranks), "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """A rank's part in one round.

    Attributes:
        round: the round from 0.
        peer: the other rank.
        sends, receives: in which directions rings will use the connection.
    """

    round: int
    peer: int
    sends: bool
    receives: bool


def planned_hops(plan: Path, *, halo_pattern: HaloPattern = "no") -> set[Hop]:
    """Return (from, to) of every message that groups of a plan send; its whole rows are read.

    If all ranks of a wave share the encoder's work, any two may meet.

    Args:
        plan: plan file.
        halo_pattern: the halo pattern of layers that do so, too.
    """
    reader = PlanReader(plan)
    if reader.metadata.encoder_balance is not None:
        return set(permutations(range(reader.metadata.num_ranks), 2))
    groups = {group for step in reader.steps() for group in step.ring_groups()}
    return hops_of(groups, reader.metadata.ranks_per_node, halo_pattern=halo_pattern)


def hops_of(groups: Iterable[RingGroup], ranks_per_node: int, *, halo_pattern: HaloPattern = "no") -> set[Hop]:
    """Return (from, to) of every message of groups, as `StepPlan.ring_groups` gives them."""
    kinds: list[Callable[..., list[Hop]]] = [ring_hops]
    if halo_pattern != "no":
        kinds.append(partial(halo_hops, whole_heads=halo_pattern == "whole heads"))
    return {
        hop for group in set(groups) for hops in kinds for hop in hops(group.ranks, ranks_per_node, group.heads_degree)
    }


def rounds_of(hops: Iterable[Hop]) -> Mapping[Hop, int]:
    """Return the round of each pair (lower rank first): the earliest in which neither rank connects to another.

    With at most P peers per rank there are fewer than 2 P rounds.
    """
    busy: dict[int, set[int]] = {}
    rounds: dict[Hop, int] = {}
    for pair in sorted({(min(hop), max(hop)) for hop in hops}):
        taken = busy.setdefault(pair[0], set()) | busy.setdefault(pair[1], set())
        # Of one number more than are taken, one is free.
        rounds[pair] = next(number for number in range(len(taken) + 1) if number not in taken)
        for rank in pair:
            busy[rank].add(rounds[pair])
    return rounds


def contacts_of(rank: int, hops: set[Hop]) -> list[Contact]:
    """Return the contacts of a rank, round by round."""
    contacts = []
    for pair, number in rounds_of(hops).items():
        if rank in pair:
            peer = pair[0] if rank == pair[1] else pair[1]
            way_out, way_in = (rank, peer) in hops, (peer, rank) in hops
            contacts.append(Contact(round=number, peer=peer, sends=way_out, receives=way_in))
    return sorted(contacts, key=lambda contact: contact.round)


class Connections:
    """Open peer connections of a rank.

    The connections of a plan are opened before its first step, those of a stream before the first step that uses them:
    between steps, in rounds, so that no rank waits for a connection in the midst of a ring while another waits for that
    rank in the next.

    Args:
        transport: carries the rings.
        rank: the rank of the plan.
        device: device of the messages.
        peers: process of each rank of the plan that holds the same part of the model as this one; None if rank r is
            process r.

    Attributes:
        halo_pattern: way in which layers look back.
        peers_met: contacted ranks; a rank counts again for each way that is opened later.
    """

    def __init__(
        self, transport: Transport, *, rank: int, device: torch.device, peers: tuple[int, ...] | None = None
    ) -> None:
        self._transport, self._rank, self._device, self._peers = transport, rank, device, peers
        self._met: set[Hop] = set()
        self.halo_pattern: HaloPattern = "no"
        self.peers_met = 0

    def open_for(self, step: StepPlan, ranks_per_node: int) -> None:
        """Meet over the ways that a step's rings are the first to use. Every rank calls it, before the step."""
        self.open_all(hops_of(step.ring_groups(), ranks_per_node, halo_pattern=self.halo_pattern))

    def open_all(self, hops: set[Hop], *, report: Callable[[str], None] | None = None) -> None:
        """Send one number over each way that was not used before. Every rank calls it, with the same ways.

        Args:
            hops: ways between ranks, as `planned_hops` finds those of a plan.
            report: takes a line of progress every ten seconds, and one at the end, or None.
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
            # On a device `wait` only enqueues: a way is open once the device has been through it.
            torch.get_device_module(self._device).synchronize(self._device)
        if report is not None:
            pairs = counted(len({frozenset(hop) for hop in new}), "pair")
            rounds = counted(1 + max(rounds_of(new).values()), "round")
            taken = duration(time.monotonic() - started)
            report(f"connected {pairs} of ranks in {rounds}, {taken} on rank {self._rank}")


def report_to_stderr(rank: int, device: torch.device) -> Callable[[str], None] | None:
    """Return a printer of progress for rank 0 of a job on accelerators, else None: on a host it takes no time."""
    if rank or device.type == "cpu":
        return None
    return lambda line: print(f"fcp: {line}", file=sys.stderr, flush=True)
