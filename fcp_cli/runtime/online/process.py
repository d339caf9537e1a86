"""Planner process of this rank: started, driven through its pipes, and ended with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from fcp_cli.errors import RunError
from fcp_cli.plan.file.messages import Message, read_message, steps_of, table_bytes, write_message
from fcp_cli.plan.metadata.job_facts import JobFacts, PlanningWish
from fcp_cli.plan.metadata.online import OnlineSettings
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.online.early import planner_process
from fcp_cli.runtime.online.items import ReadBatch


class PlanningProcess:
    """Plans steps of one job in a child process, which ends with this process in any case.

    Attributes:
        opened: the journal's `refits`, the step that earlier runs have `planned_to`, and facts of the subclass.
    """

    def __init__(self, opening: Mapping[str, Any], table: bytes = b"") -> None:
        self._process = planner_process()
        self._tell("open", opening, table)
        self.opened: Mapping[str, Any] = self._answer().facts

    def refit(self, first_step: int, measured: bytes) -> Mapping[str, Any]:
        """Return the `refit` that takes effect at a step (None without a change), and a `line` about it.

        Args:
            first_step: next step to plan.
            measured: table of the micro-batches trained since the last refit.
        """
        self._tell("measured", {"first_step": first_step}, measured)
        return self._answer().facts

    def close(self, end_step: int, *, is_stopped: bool = False) -> str | None:
        """End the process; return the hash of the plan it wrote.

        Args:
            end_step: the step after the last trained one.
            is_stopped: whether the loop was ended early; the next run then continues the plan.
        """
        try:
            self._tell("close", {"end_step": end_step, "is_stopped": is_stopped})
            found: str | None = self._answer().facts["plan_hash"]
            return found
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the process end by itself, keeping its plan."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(OSError):
                    pipe.close()

    def _tell(self, kind: str, facts: Mapping[str, Any], table: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # if it has ended, its last answer contains the reason
            write_message(self._process.stdin, {"kind": kind, **facts}, table)

    def _answer(self) -> Message:
        assert self._process.stdout is not None
        answer = read_message(self._process.stdout)
        if answer is None:
            raise RunError(f"the planning process ended with status {self._process.wait()}; its output is above")
        if answer.kind == "error":
            raise RunError(answer.facts["message"])
        return answer


class StreamProcess(PlanningProcess):
    """Plans batches of a stream."""

    def __init__(self, settings: OnlineSettings, plan: Path, first_step: int) -> None:
        super().__init__({"settings": settings.to_json(), "plan": str(plan), "first_step": first_step})

    def plan(self, batch: ReadBatch) -> list[StepPlan]:
        """Return the planned step of a batch."""
        self._tell("batch", _facts_of(batch), table_bytes(batch.columns()))
        return steps_of(self._answer().table)

    def compare(self, batch: ReadBatch) -> None:
        """Compare a batch with the one trained before; the next answer is an error if they differ."""
        self._tell("trained", _facts_of(batch), table_bytes(batch.columns()))

    def adopt(self, refit: Mapping[str, Any]) -> None:
        """Use a refit for planning from its first step on."""
        self._tell("adopt", {"refit": refit})


class JobProcess(PlanningProcess):
    """Plans the steps of a job whose data is known from the start.

    Args:
        plan: path of the plan.
        job, wish: facts of the job, and planning options.
        rows: rows of the training data, as columns of a manifest.
    """

    def __init__(self, plan: Path, job: JobFacts, wish: PlanningWish, rows: pa.Table) -> None:
        opening = {"plan": str(plan), "job": asdict(job), "wish": asdict(wish)}
        super().__init__(opening, table_bytes(rows))

    def plan(self, first_step: int, steps: int) -> list[StepPlan]:
        """Return the next `steps` planned steps; fewer at the end of the plan."""
        self._tell("steps", {"first_step": first_step, "steps": steps})
        return steps_of(self._answer().table)


def _facts_of(batch: ReadBatch) -> dict[str, Any]:
    return {"step": batch.step, "first_sequence": batch.first_sequence}
