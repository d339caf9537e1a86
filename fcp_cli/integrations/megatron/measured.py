"""Metrics of a Megatron job: micro-batch times, from one forward to the next, and the script's loss sums.

With several model chunks, forwards of the last one delimit micro-batches, so that they do not overlap; work of other
chunks in between counts for the previous micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.data.cursor import RankStep
from fcp_cli.runtime.metrics.running_step import RunningStep
from fcp_cli.runtime.session.rank_job import RankJob


def computes_loss() -> bool:
    """Return whether this process computes its rank's loss: last stage, first tensor-parallel rank."""
    is_last_stage: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last_stage and not parallel_state.get_tensor_model_parallel_rank()


class ScheduleRecorder:
    """Records the steps of one process; a no-op unless it computes its rank's loss.

    Args:
        job: job of this process, joined with `records=computes_loss()`.
    """

    def __init__(self, job: RankJob) -> None:
        self._recorder, self._clock = job.recorder, job.clock
        self._is_open = False
        self._record: RunningStep | None = None
        self._running: tuple[int, Any] | None = None  # order and begin
        self._first: Any = None  # mark of the step's first forward
        self._sums: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def begin(self, step: RankStep) -> None:
        """Begin a step, which also ends the previous one, including its optimizer step."""
        if self._recorder is None:
            return
        if not self._is_open:
            self._recorder.open(step.step)
            self._is_open = True
        self._record = self._recorder.begin(step.step, step.makespan_seconds)
        self._sums, self._tokens = [], []
        self._first = None

    def go_on(self, row: MicroBatch, *, is_last_chunk: bool) -> None:
        """Mark the start of a micro-batch's forward, which ends the previous micro-batch."""
        if self._recorder is None or self._record is None:
            return
        now = self._clock.mark()
        self._first = now if self._first is None else self._first
        if not is_last_chunk:
            return
        self._close(now)
        self._recorder.enter()
        # The first micro-batch of a step starts with the step's first forward, of any chunk.
        self._running = (row.order, now if self._record.marks else self._first)

    def add_loss(self, loss_sum: Any, tokens: Any) -> None:
        """Record a micro-batch's loss sum and number of tokens, as returned by the script's loss function."""
        if self._record is not None:
            self._sums.append(torch.as_tensor(loss_sum).detach().reshape(()))
            self._tokens.append(torch.as_tensor(tokens).detach().reshape(()))

    def leave(self) -> None:
        """Mark the end of all micro-batches, with complete gradients."""
        if self._record is None:
            return
        self._close(self._clock.mark())
        self._record.note_loss(self._sums, torch.stack(self._tokens).sum() if self._tokens else 0)
        self._record.is_whole = True

    def _close(self, now: Any) -> None:
        if self._running is not None and self._record is not None:
            order, begin = self._running
            self._record.marks.append((order, begin, now))
            self._running = None
