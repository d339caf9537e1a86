"""Say where a rank is when it has waited too long: in which step, which ring, and for which ranks.

Rings block without a word: a rank whose neighbour never comes ends, minutes later, with the name of a collective. A
background thread watches the progress of the device, and prints its own line before the time-out. Each
rank of a job that hangs prints one, and the rank in the earliest micro-batch holds the others up.
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

_SHARE = 0.9  # of the time-out, after which the line is printed
_TORCH_SECONDS = {"cpu": 1800.0}  # torch's own time-outs: of gloo, and of NCCL and HCCL
_TORCH_DEVICE_SECONDS = 600.0
_LOOKS = 20  # at the device, within the time


@dataclass(slots=True, eq=False)
class StepPart:
    """A part of a step that a rank has begun.

    Attributes:
        step: optimizer step.
        row: micro-batch with its ranks in ring order; None: the reduction of gradients at the end of the step.
        end: mark of the clock behind it; None while the host is in it.
    """

    step: int
    row: MicroBatch | None
    end: Any = None


class Watch:
    """Watches one rank. `begin` and `StepPart.end` are set by the training loop, all else is seen by a thread.

    Args:
        rank: the rank of the plan.
        clock: the clock of the session.
        seconds: how long a place may last without a word.
        report: takes the line.
    """

    def __init__(self, rank: int, clock: Clock, seconds: float, report: Callable[[str], None]) -> None:
        self._rank, self._clock, self._seconds, self._report = rank, clock, seconds, report
        self._places: deque[StepPart] = deque()
        self._latest: StepPart | None = None
        self._seen: StepPart | None = None
        self._since, self._is_told = 0.0, False
        self._stop = threading.Event()

    def start(self) -> None:
        """Start watching, until `stop`, or until the watch is garbage-collected."""
        weakref.finalize(self, self._stop.set)
        given = (weakref.ref(self), self._stop, self._seconds / _LOOKS)
        threading.Thread(target=_watch, args=given, name="fcp-watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def begin(self, step: int, row: MicroBatch | None) -> StepPart:
        """Note that a part of a step begins; give the place its end when the host has left it."""
        self._latest = place = StepPart(step, row)
        self._places.append(place)
        return place

    def go_on(self, step: int, row: MicroBatch) -> None:
        """Note that a micro-batch begins when the previous one ends, in a loop that reports nothing else."""
        self.leave()
        self.begin(step, row)

    def leave(self) -> None:
        """Note that the host has left the micro-batch that was begun last, if any."""
        if self._latest is not None and self._latest.end is None:
            self._latest.end = self._clock.mark()

    def forget(self) -> None:
        """Forget all micro-batches: the training loop was left."""
        self._places.clear()

    def look(self, now: float) -> None:
        """Report where the device is, once, if it has been there too long at `now` (seconds of a monotonic clock)."""
        places = self._places
        # In a thread of its own while the loop appends: single operations of a deque are atomic.
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
        del watch  # or the thread itself would keep it


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
    """Return a watch that speaks before the job's time-out, on standard error."""
    given = rank_timeout()
    torch_seconds = _TORCH_SECONDS.get(device.type, _TORCH_DEVICE_SECONDS)
    seconds = torch_seconds if given is None else given.total_seconds()
    return Watch(rank, clock, _SHARE * seconds, lambda line: print(f"fcp: {line}", file=sys.stderr, flush=True))
