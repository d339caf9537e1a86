"""The planner process of this one: started, driven through its pipes, and ended with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.plan.messages import Message, read_message, steps_of, table_bytes, write_message
from fcp_cli.plan.online import OnlineSettings
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.online.items import ReadWindow

PROGRAM = "fcp_cli.planning.online"


class PlanningProcess:
    """Plans windows of one job. Where this process ends, however it does, so does that one.

    Args:
        settings: of the plan.
        plan: path of the plan; None: another process of the job writes it.
        first_step: with which the job begins.

    Attributes:
        opened: the `first_sequence` that is not planned yet, the recorded `refits`, and the step that earlier starts
            have `planned_to`.

    Raises:
        RunError: it cannot begin with this step.
    """

    def __init__(self, settings: OnlineSettings, plan: Path | None, first_step: int) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        opening = {
            "settings": settings.to_json(),
            "plan": None if plan is None else str(plan),
            "first_step": first_step,
        }
        self._tell("open", opening)
        self.opened: Mapping[str, Any] = self._answer().facts

    def plan(self, window: ReadWindow) -> list[StepPlan]:
        """Return the planned steps of a window.

        Raises:
            RunError: it cannot be planned.
        """
        self._tell("window", _facts_of(window), table_bytes(window.columns()))
        return steps_of(self._answer().table)

    def compare(self, window: ReadWindow) -> None:
        """Have a window compared with the one trained before; the next answer says if it differs."""
        self._tell("trained", _facts_of(window), table_bytes(window.columns()))

    def refit(self, first_step: int, measured: bytes) -> Mapping[str, Any]:
        """Return the `refit` from a step on, None without a change, and a `line` about it.

        Args:
            first_step: that is planned next.
            measured: the table of micro-batches that were trained since.

        Raises:
            RunError: it cannot be kept.
        """
        self._tell("measured", {"first_step": first_step}, measured)
        return self._answer().facts

    def adopt(self, refit: Mapping[str, Any]) -> None:
        """Plan by a refit from its first step on."""
        self._tell("adopt", {"refit": refit})

    def close(self, end_step: int) -> str | None:
        """Have the plan of the steps before `end_step` written, and end the process; return the plan's hash.

        Raises:
            RunError: it cannot be written; its journal is kept next to it.
        """
        try:
            self._tell("close", {"end_step": end_step})
            found: str | None = self._answer().facts["plan_hash"]
            return found
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the process end by itself; its plan is kept."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(OSError):
                    pipe.close()

    def _tell(self, kind: str, facts: dict[str, Any], table: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # why it has ended, its last answer says
            write_message(self._process.stdin, {"kind": kind, **facts}, table)

    def _answer(self) -> Message:
        assert self._process.stdout is not None
        answer = read_message(self._process.stdout)
        if answer is None:
            raise RunError(
                f"the planning process ended with status {self._process.wait()}; what it printed stands above"
            )
        if answer.kind == "error":
            raise RunError(answer.facts["message"])
        return answer


def _facts_of(window: ReadWindow) -> dict[str, Any]:
    sizes: Sequence[int] = window.sizes
    return {"first_step": window.first_step, "first_sequence": window.first_sequence, "sizes": sizes}
