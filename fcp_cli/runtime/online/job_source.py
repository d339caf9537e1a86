"""Steps of a job that was launched without a plan: rank 0's planner process plans them ahead of the loop."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fcp_cli.arrays import IntArray
from fcp_cli.plan.file.messages import steps_bytes
from fcp_cli.plan.metadata.online import OnlineSettings
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.data.cursor import orders_of_rank
from fcp_cli.runtime.online.control import Control
from fcp_cli.runtime.online.process import JobProcess
from fcp_cli.runtime.online.source import END, STEPS, StreamSource, joined_message

_FIRST_STEPS: Final = 2  # planned before the loop starts
_STEPS_AT_ONCE: Final = 8
# Measurements to collect before fitting times: a minute of training, or this many steps if they are short.
_MEASURED_SECONDS: Final = 60.0
_MEASURED_STEPS: Final = 64
_MEASURED_MICROBATCHES: Final = 32


class JobSource(StreamSource):
    """Steps of a job whose sequences are the rows of its manifest.

    Args:
        settings: settings of the plan, with all its steps.
        path: path of the plan to write.
        control: messages between ranks.
        lengths: [rows] tokens of the training data.
        process: planner process on rank 0; None on other ranks.
    """

    follows_manifest = True

    def __init__(
        self, settings: OnlineSettings, path: Path, control: Control, lengths: IntArray, process: JobProcess | None
    ) -> None:
        super().__init__((), settings, path, control, None)
        self.lengths = lengths
        self._planner = process
        self._wants_measurements = process is not None and bool(process.opened["wants_measurements"])
        self._rows: deque[int] | None = None  # rows of this rank, in the order of its micro-batches

    def rows_ahead(self) -> Iterator[int | None]:
        """Yield the rows that this rank needs, in order and without end; None if the next one is not planned yet.

        Call it before the first step is planned.
        """
        self._rows = deque()
        return self._taken_rows(self._rows)

    @staticmethod
    def _taken_rows(rows: deque[int]) -> Iterator[int | None]:
        while True:
            yield rows.popleft() if rows else None

    def _begin_process(self, first_step: int) -> dict[str, Any]:
        assert self._planner is not None
        self._process = self._planner
        return dict(self._planner.opened)

    def _begin_reading(self, first_step: int, opened: Mapping[str, Any]) -> Callable[[], None] | None:
        return None

    def _plan_steps(self, due: int) -> bytes:
        assert self._planner is not None
        if due >= self.settings.metadata.end_step:
            return joined_message({"state": END})
        self._fit_times(due)
        steps = self._planner.plan(due, _FIRST_STEPS if due == self._first_step else _STEPS_AT_ONCE)
        return joined_message({"state": STEPS}, steps_bytes(steps))

    def _fit_times(self, due: int) -> None:
        """Plan further steps with measured times, once enough steps were trained; only rank 0 plans."""
        assert self._planner is not None
        if self._wants_measurements and self.measured.has(
            seconds=_MEASURED_SECONDS, steps=_MEASURED_STEPS, micro_batches=_MEASURED_MICROBATCHES
        ):
            self._wants_measurements = False
            print(f"fcp: {self._planner.refit(due, self.measured.take())['line']}", file=sys.stderr, flush=True)

    def _note_given(self, facts: Mapping[str, Any], steps: list[StepPlan], due: int) -> None:
        for step in steps:
            if self._rows is not None:
                for order in orders_of_rank(step, self._control.rank):
                    self._rows.extend(step.microbatch(int(order)).sequences)
