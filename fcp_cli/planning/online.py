"""Request loop of a planner process: batches of lengths in, planned steps out, all recorded in a journal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fcp_cli import __version__
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile
from fcp_cli.errors import FcpError, OverlongError, PlanError, UsageError
from fcp_cli.manifest.table import LengthTable, checked_table
from fcp_cli.plan.file import Message, read_message, steps_bytes, table_of, write_message
from fcp_cli.plan.metadata import (
    Batching,
    ManifestReference,
    OnlineSettings,
    PlanMetadata,
    ScheduledRefit,
    settings_of_json,
)
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, batch_of, step_seed
from fcp_cli.planning.fcp_solver import FcpSolver, solver_of
from fcp_cli.planning.journal import StreamJournal, table_of_columns
from fcp_cli.planning.problem import Problem, Solver, problem_of
from fcp_cli.planning.refitting import Refitter
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.validation import validated

if TYPE_CHECKING:
    from fcp_cli.planning.job_plan import JobPlanner


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
    from fcp_cli.planning.job_plan import planner_of

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
        self._journal = StreamJournal(Path(facts["plan"]))
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


# Settings of a stream's plan: batching rule, and metadata before planning.


def stream_batching(global_batch_size: int | None, global_batch_tokens: int | None) -> Batching | None:
    """Return the batching rule of a stream, or None for `global_batch_size` sequences each."""
    given = {"global_batch_size": global_batch_size, "global_batch_tokens": global_batch_tokens}
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; it must be a whole number of at least 1")
    if global_batch_size is not None and global_batch_tokens is not None:
        raise UsageError("global_batch_size and global_batch_tokens both say what a step trains; give one of them")
    if global_batch_tokens is not None:
        return Batching(by="tokens", tokens=global_batch_tokens)
    return Batching(by="given") if global_batch_size is None else None


def stream_metadata(
    problem: Problem, solver: Solver, global_batch_size: int | None, batching: Batching | None
) -> PlanMetadata:
    """Return the metadata of a stream's plan without totals, manifest and hash."""
    if problem.attention == "ulysses":
        raise UsageError("--attention ulysses holds no sequence longer than all heads' ranks do; give a stream 2d")
    return PlanMetadata(
        **problem.metadata_fields(),
        fcp_version=__version__,
        global_batch_size=global_batch_size or 1,
        seed=0,
        shuffle=False,
        batching=batching,
        solver=solver.name,
        solver_options=solver.options,
        manifest=ManifestReference(name="", rows=0, content_hash=""),
    )


# Planner of a stream's batches as they arrive, with the same result as `fcp plan` on the stream's manifest.


class StreamPlanner:
    """Planner of batches under the problem in a plan's metadata."""

    def __init__(self, metadata: PlanMetadata) -> None:
        self.metadata = metadata
        self._refitter = Refitter(problem_of(replace(metadata, refits=None), name="the stream"))
        self._plan_as_of(0)

    def adopt(self, refit: ScheduledRefit) -> None:
        """Apply a refit from its first step on, replacing refits of later steps."""
        before = [one for one in self.metadata.refits or () if one.first_step < refit.first_step]
        self.metadata = replace(self.metadata, refits=(*before, refit))
        self._plan_as_of(refit.first_step)

    def refit(self, first_step: int, measured: pa.Table) -> tuple[ScheduledRefit | None, str]:
        """Return the refit from a step on, or None, and a line of explanation; see `Refitter.refit`."""
        return self._refitter.refit(first_step, measured, self.metadata.refit_at(first_step))

    def _plan_as_of(self, step: int) -> None:
        self._problem = problem_of(self.metadata, name="the stream", step=step)
        self._solver: FcpSolver = solver_of(self._problem, max_degree=self.metadata.solver_options.get("max_degree"))

    def plan(self, table: LengthTable, *, step: int, first_sequence: int) -> StepPlan:
        """Return the planned step of a batch.

        Args:
            table: [sequences] lengths and work factors.
            step: optimizer step of the batch.
            first_sequence: index of its first sequence in the stream.

        Raises:
            PlanError, OverlongError: the batch is empty or invalid, or the ranks cannot hold a sequence.
        """
        if not len(table):
            raise PlanError(f"batch {step} of the stream is empty; a step needs a sequence")
        checked_table("the stream", "length", table.length_tokens, {})
        self._require_room(table, first_sequence)
        places = np.arange(len(table))
        batch = batch_of(
            table.take(places),  # copies: compiled code rejects Arrow's read-only arrays
            self._problem,
            step=step,
            rows=first_sequence + places,
            seed=step_seed(self.metadata.seed, step),
        )
        planned = assemble(self._solver.assign(batch), batch, self._problem)
        self._refitter.keep(planned, table.take(planned.sequences - first_sequence))
        return planned

    def _require_room(self, table: LengthTable, first_sequence: int) -> None:
        ranks, tokens = self._problem.num_ranks, self._problem.tokens_per_rank
        without_rings = "max_degree" in self._solver.options
        lengths = table.length_tokens
        longest = int(lengths.max())
        if longest > tokens * (1 if without_rings else ranks):
            holds = "without rings a rank holds" if without_rings else f"{ranks} ranks of {tokens} tokens hold"
            most = tokens if without_rings else ranks * tokens
            raise OverlongError(
                f"sequence {first_sequence + int(lengths.argmax())} of the stream has {longest} tokens; {holds} "
                f"at most {most}; drop it from the stream, truncate it, or plan with more tokens_per_rank or ranks"
            )


# Warm-up of a planner process: loads imports and compiled loops before its first request.


def load_planner() -> None:
    """Plan a tiny step with a ring, to load everything that the first step of a job needs."""
    import fcp_cli.planning.job_plan  # noqa: F401  # serves the first request

    costs = Coefficients(
        attention_seconds_per_token2=1e-9,
        linear_seconds_per_token=1e-4,
        ring_bytes_per_token=1e3,
        microbatch_seconds=0.1,
    )
    profile = CostProfile(
        model="none",
        cluster="none",
        origin="assumed",
        coefficients=costs,
        bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
    )
    problem = Problem(num_ranks=2, ranks_per_node=2, tokens_per_rank=64, sync="iteration", profile=profile)
    table = LengthTable(name="none", length_tokens=np.array([96, 40, 30, 20, 10, 5], dtype=np.int64))
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table)))
    assemble(make_solver("fcp", batches).assign(batches.batch(0)), batches.batch(0), problem)
