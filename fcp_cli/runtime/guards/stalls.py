"""Report a rank that has waited too long: its step, its ring, and the ranks it waits for.

Rings block silently: a rank whose neighbour never comes aborts minutes later with the name of a collective. A
background thread watches the progress of the device, and prints a line before the timeout. In a job that hangs each
rank prints one, and the rank in the earliest micro-batch is the straggler.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.communication.world import rank_timeout
from fcp_cli.runtime.metrics.timing import Clock

_SHARE = 0.9  # of the timeout, after which the line is printed
_TORCH_SECONDS = {"cpu": 1800.0}  # torch's default timeouts: for gloo, and for NCCL and HCCL
_TORCH_DEVICE_SECONDS = 600.0
_LOOKS = 20  # polls of the device within that time


@dataclass(slots=True, eq=False)
class StepPart:
    """Part of a step that a rank has begun.

    Attributes:
        step: optimizer step.
        row: micro-batch with its ranks in ring order, or None for the gradient reduction at the end of the step.
        end: mark of the clock at its end; None while the host is in it.
    """

    step: int
    row: MicroBatch | None
    end: Any = None


class Watch:
    """Stall reporter of one rank. The training loop calls `begin` and sets `StepPart.end`; a thread does the rest.

    Args:
        rank: rank in the plan.
        clock: clock of the session.
        seconds: time in one part of a step after which to report.
        report: receives the line.
    """

    def __init__(self, rank: int, clock: Clock, seconds: float, report: Callable[[str], None]) -> None:
        self._rank, self._clock, self._seconds, self._report = rank, clock, seconds, report
        self._places: deque[StepPart] = deque()
        self._latest: StepPart | None = None
        self._seen: StepPart | None = None
        self._since, self._is_told = 0.0, False
        self._stop = threading.Event()

    def start(self) -> None:
        """Start watching, until `stop` or until the watch is garbage-collected."""
        weakref.finalize(self, self._stop.set)
        given = (weakref.ref(self), self._stop, self._seconds / _LOOKS)
        threading.Thread(target=_watch, args=given, name="fcp-watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def begin(self, step: int, row: MicroBatch | None) -> StepPart:
        """Record the start of a part of a step; the caller sets its `end` when the host has left it."""
        self._latest = place = StepPart(step, row)
        self._places.append(place)
        return place

    def go_on(self, step: int, row: MicroBatch) -> None:
        """Record that a micro-batch begins and the previous one ends, for loops that report nothing else."""
        self.leave()
        self.begin(step, row)

    def leave(self) -> None:
        """Record that the host has left the latest micro-batch, if any."""
        if self._latest is not None and self._latest.end is None:
            self._latest.end = self._clock.mark()

    def forget(self) -> None:
        """Drop all micro-batches, since the training loop was abandoned."""
        self._places.clear()

    def look(self, now: float) -> None:
        """Report the device's current part once if it has lasted too long at `now` (monotonic seconds)."""
        places = self._places
        # Runs in the watch's thread while the loop appends: single deque operations are atomic.
        while places and places[0].end is not None and self._clock.has_passed(places[0].end):
            places.popleft()
        place = places[0] if places else None
        if place is not self._seen:
            self._seen, self._since, self._is_told = place, now, False
        elif place is not None and not self._is_told and now - self._since > self._seconds:
            self._is_told = True
            self._report(_line(self._rank, place, now - self._since))


def _watch(watched: weakref.ref[Watch], stop: threading.Event, every_seconds: float) -> None:
    while not stop.wait(every_seconds):
        if (watch := watched()) is None:
            return
        watch.look(time.monotonic())
        del watch  # or the thread would keep it alive


def _line(rank: int, place: StepPart, seconds: float) -> str:
    begun = f"rank {rank} has been in step {place.step} for {seconds:.0f} s"
    if place.row is None:
        return f"{begun}, at the sum of gradients over all ranks: one that is not there yet holds the others up"
    ranks = place.row.ranks
    where = f"{begun}, in micro-batch {place.row.order}"
    if len(ranks) == 1:
        return f"{where}, which it runs alone: it computes for long, or waits for all ranks' weights or gradients"
    at, shared = ranks.index(rank), place.row.heads_degree
    ring, first = ranks[at % shared :: shared], at - at % shared
    sharing = [other for other in ranks[first : first + shared] if other != rank]
    among = f", sharing heads with {_and(sharing)}" if sharing else ""
    if len(ring) > 1:
        among += (
            f", next to {_and(dict.fromkeys((ring[at // shared - 1], ring[(at // shared + 1) % len(ring)])))} in the "
        )
        among += f"ring of {', '.join(map(str, ring))}"
    return f"{where}{among}: the one in the earliest micro-batch holds the others up"


def _and(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def watch_for(rank: int, clock: Clock, device: torch.device) -> Watch:
    """Return a watch that reports on stderr before the job's timeout."""
    given = rank_timeout()
    torch_seconds = _TORCH_SECONDS.get(device.type, _TORCH_DEVICE_SECONDS)
    seconds = torch_seconds if given is None else given.total_seconds()
    return Watch(rank, clock, _SHARE * seconds, lambda line: print(f"fcp: {line}", file=sys.stderr, flush=True))
