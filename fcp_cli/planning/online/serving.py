"""Request loop of a planner process: batches of lengths in, planned steps out, all recorded in a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fcp_cli.errors import FcpError, PlanError
from fcp_cli.plan.file.messages import Message, read_message, steps_bytes, table_of, write_message
from fcp_cli.plan.metadata.online import OnlineSettings, settings_of_json
from fcp_cli.plan.metadata.refits import ScheduledRefit
from fcp_cli.planning.online.journal import OnlineJournal, table_of_columns
from fcp_cli.planning.online.stream import StreamPlanner
from fcp_cli.validation import validated

if TYPE_CHECKING:
    from fcp_cli.planning.dataset.job_plan import JobPlanner


def serve(received: IO[bytes], answers: IO[bytes]) -> None:
    """Answer messages until the job closes the pipe; an error is sent as a message and ends the loop."""
    opening = read_message(received)
    if opening is None:
        return
    try:
        service = _service_of(opening)
        write_message(answers, service.opened())
        while (message := read_message(received)) is not None:
            answer = service.answer(message)
            if answer is not None:
                write_message(answers, *answer)
            if message.kind == "close":
                return
    except FcpError as error:
        write_message(answers, {"kind": "error", "message": str(error)})
    except BrokenPipeError:
        pass  # the job has ended; its steps are in the journal


def _service_of(opening: Message) -> Service | JobPlanner:
    if "job" not in opening.facts:
        return Service(opening.facts)
    from fcp_cli.planning.dataset.job_plan import (
        planner_of,  # lazy: a third of the planner's imports, which streams do not need
    )

    return planner_of(opening)


class Service:
    """Request handler for the plan of a stream.

    Attributes:
        first_sequence: index of the first sequence to plan; earlier ones were trained before a restart.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.settings: OnlineSettings = settings_of_json(json.loads(facts["settings"]), name="the planning process")
        if self.settings.options.refit_every is not None and self.settings.metadata.pipeline is not None:
            raise PlanError("refit_every does not support pipelines, whose micro-batches depend on each other; drop it")
        self._planner = StreamPlanner(self.settings.metadata)
        self._journal = OnlineJournal(Path(facts["plan"]))
        self._kept = self._journal.begin(self.settings.metadata, facts["first_step"])
        self.first_sequence = 0 if self._kept is None else len(self._kept)

    def opened(self) -> dict[str, Any]:
        """Return the opening message to the job."""
        return {
            "kind": "opened",
            "first_sequence": self.first_sequence,
            "planned_to": self._journal.planned_to,
            "refits": [asdict(refit) for refit in self._journal.metadata.refits or ()],
        }

    def answer(self, message: Message) -> tuple[dict[str, Any], bytes] | None:
        """Return the answer to a message, or None if it expects none."""
        if message.kind == "batch":
            return self._plan(message)
        if message.kind == "measured":
            return self._refit(message)
        if message.kind == "adopt":
            self._planner.adopt(
                validated(message.facts["refit"], ScheduledRefit, where="the planning process", error=PlanError)
            )
            return None
        if message.kind == "trained":
            self._require_as_before(message)
            return None
        return self._close(message.facts["end_step"])

    def _plan(self, message: Message) -> tuple[dict[str, Any], bytes]:
        facts, columns = message.facts, table_of(message.table)
        table = table_of_columns(columns, name="the stream")
        steps = [self._planner.plan(table, step=facts["step"], first_sequence=facts["first_sequence"])]
        self._journal.append(columns, steps)
        return {"kind": "steps"}, steps_bytes(steps)

    def _refit(self, message: Message) -> tuple[dict[str, Any], bytes]:
        """Compute and record a refit, and return it as an answer."""
        found, line = self._planner.refit(message.facts["first_step"], table_of(message.table))
        if found is not None:
            self._journal.note_refit(found)
        return {"kind": "refit", "refit": found and asdict(found), "line": line}, b""

    def _require_as_before(self, message: Message) -> None:
        """Raise PlanError if a restarted stream differs from the sequences that were trained before."""
        if self._kept is None:
            return
        first = message.facts["first_sequence"]
        again = table_of(message.table).column("length").to_numpy()
        before = self._kept.column("length").to_numpy()[first : first + len(again)]
        differs = np.flatnonzero(again[: len(before)] != before)
        if len(differs) or len(before) < len(again):
            at = int(differs[0]) if len(differs) else len(before)
            found = f"{again[at]} tokens" + (
                f", where it had {before[at]}" if len(differs) else ", where there was none"
            )
            raise PlanError(
                f"the stream starts over, but its sequence {first + at} has {found} when it was trained; give the "
                "same stream, or begin where the run stopped with stream_begins='here'"
            )

    def _close(self, end_step: int) -> tuple[dict[str, Any], bytes]:
        if not end_step:
            self._journal.remove()
            return {"kind": "closed", "plan_hash": None}, b""
        return {"kind": "closed", "plan_hash": self._journal.finish(end_step).plan_hash}, b""
