"""Executes one step as the runtime does: every rank runs its rows in order, a group starts when all have arrived.

Under `sync: microbatch` a wave starts when the former wave's slowest micro-batch has ended. Time advances from one
end of a micro-batch to the next.

Ranks that share CPU cores (`cores`) are approximated by processor sharing: while A > cores ranks compute, each runs
at cores / A of its speed. What this leaves out: the scheduler's time slices, caches and memory bandwidth that the
ranks also share, and threads inside a rank (one rank = one core's worth of work). A rank that waits costs nothing.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.simulation.timeline import Timeline


def simulate_step(
    step: StepPlan,
    *,
    num_ranks: int,
    sync: Sync,
    seconds: npt.ArrayLike | None = None,
    cores: int | None = None,
) -> Timeline:
    """Run one step.

    Args:
        step: the planned step; its times are not read except, without `seconds`, `step.seconds`.
        num_ranks: ranks of the job.
        sync: where ranks wait for each other.
        seconds: [microbatches] how long each takes once started, undisturbed; the plan's prediction by default.
        cores: CPU cores that all ranks share; None where every rank has its own device.

    Raises:
        PlanError: a rank's rows are not in the order of its waves, so that the step would never end.
    """
    duration = step.seconds if seconds is None else np.asarray(seconds, dtype=np.float64)
    assert duration.shape == step.seconds.shape
    execution = _Execution(step, num_ranks, duration, step.wave if sync == "microbatch" else np.zeros_like(step.wave))
    execution.run(cores or num_ranks)
    return Timeline(
        step=step.step,
        rank_offsets=step.rank_offsets,
        ranks=step.ranks,
        start_seconds=np.array(execution.start),
        end_seconds=np.array(execution.end),
        arrival_seconds=np.array(execution.arrival),
        num_ranks=num_ranks,
    )


class _Execution:
    """The state of a running step; plain lists, since every event touches a few elements only."""

    def __init__(self, step: StepPlan, num_ranks: int, duration: npt.NDArray[np.float64], wave: npt.ArrayLike) -> None:
        self.step = step.step
        self.offsets: list[int] = step.rank_offsets.tolist()
        self.ranks: list[int] = step.ranks.tolist()
        self.duration: list[float] = duration.tolist()
        self.wave: list[int] = np.asarray(wave).tolist()
        rows = len(step)
        self.start, self.end = [0.0] * rows, [0.0] * rows
        self.arrival = [0.0] * len(self.ranks)
        self.missing: list[int] = step.degrees.tolist()  # ranks that a group still waits for
        self.slots = _slots_of_ranks(step, num_ranks)  # per rank its slots in `ranks`, the next one last
        self.owner: list[int] = np.repeat(np.arange(rows), step.degrees).tolist()
        self.unfinished = _count(self.wave)
        self.open_waves = sorted(self.unfinished, reverse=True)
        self.held: dict[int, list[int]] = {}  # complete groups whose wave has not begun
        self.running: list[tuple[float, int]] = []  # (virtual end, row)
        self.computing = 0  # ranks that compute now

    def run(self, cores: int) -> None:
        """Work through all events; virtual time is the work that each computing rank has had."""
        virtual, lag = 0.0, 0.0  # real time = virtual + lag; lag stays exactly 0 while no core is shared
        for rank in range(len(self.slots)):
            self._arrive(rank, virtual, lag)
        while self.running:
            virtual_end = self.running[0][0]
            if self.computing > cores:
                lag += (virtual_end - virtual) * (self.computing / cores - 1.0)
            virtual = virtual_end
            self._finish(heapq.heappop(self.running)[1], virtual, lag)
        if any(self.slots):
            raise PlanError(
                f"step {self.step} cannot be executed: a rank's rows do not follow its waves; run 'fcp check'"
            )

    def _arrive(self, rank: int, virtual: float, lag: float) -> None:
        """A rank is free: it joins the group of its next row, and the last to join starts it."""
        if not self.slots[rank]:
            return
        slot = self.slots[rank].pop()
        self.arrival[slot] = virtual + lag
        row = self.owner[slot]
        self.missing[row] -= 1
        if self.missing[row]:
            return
        if self.wave[row] == self.open_waves[-1]:
            self._begin(row, virtual, lag)
        else:
            self.held.setdefault(self.wave[row], []).append(row)

    def _begin(self, row: int, virtual: float, lag: float) -> None:
        self.start[row] = virtual + lag
        self.computing += self.offsets[row + 1] - self.offsets[row]
        heapq.heappush(self.running, (virtual + self.duration[row], row))

    def _finish(self, row: int, virtual: float, lag: float) -> None:
        self.end[row] = virtual + lag
        self.computing -= self.offsets[row + 1] - self.offsets[row]
        self.unfinished[self.wave[row]] -= 1
        if not self.unfinished[self.open_waves[-1]]:
            self.open_waves.pop()
            for waiting in self.held.pop(self.open_waves[-1], ()) if self.open_waves else ():
                self._begin(waiting, virtual, lag)
        for slot in range(self.offsets[row], self.offsets[row + 1]):
            self._arrive(self.ranks[slot], virtual, lag)


def _slots_of_ranks(step: StepPlan, num_ranks: int) -> list[list[int]]:
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    ranks = step.ranks.tolist()
    for slot in range(len(ranks) - 1, -1, -1):
        slots[ranks[slot]].append(slot)
    return slots


def _count(waves: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for wave in waves:
        counts[wave] = counts.get(wave, 0) + 1
    return counts
