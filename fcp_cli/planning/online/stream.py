"""Plans the batches of a stream as they come, each exactly as `fcp plan` plans it from the stream's manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import OverlongError, PlanError
from fcp_cli.manifest.table.checks import checked_table
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.batching import offsets_by_tokens
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import ScheduledRefit
from fcp_cli.plan.step import StepPlan, offsets_of
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batching.batches import batch_of, step_seed
from fcp_cli.planning.dataset.refitting import Refitter
from fcp_cli.planning.fcp.solver import FcpSolver, solver_of
from fcp_cli.planning.problem import problem_of
from fcp_cli.planning.work import batch_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Batches that were read together, one or as many as `--reorder-window` says.

    Attributes:
        first_sequence: number of its first sequence in the stream.
        sizes: sequences of each batch.
        table: [sequences] lengths and work factors.
    """

    first_step: int
    first_sequence: int
    sizes: Sequence[int]
    table: LengthTable


class StreamPlanner:
    """Plans windows under the problem that a plan's metadata states."""

    def __init__(self, metadata: PlanMetadata) -> None:
        self.metadata = metadata
        self._refitter = Refitter(problem_of(replace(metadata, refits=None), name="the stream"))
        self._plan_as_of(0)

    def adopt(self, refit: ScheduledRefit) -> None:
        """Plan by a refit from its first step on."""
        before = [one for one in self.metadata.refits or () if one.first_step < refit.first_step]
        self.metadata = replace(self.metadata, refits=(*before, refit))
        self._plan_as_of(refit.first_step)

    def refit(self, first_step: int, measured: pa.Table) -> tuple[ScheduledRefit | None, str]:
        """Return the refit from a step on, if any, and a line about it; see `Refitter.refit`."""
        return self._refitter.refit(first_step, measured, self.metadata.refit_at(first_step))

    def _plan_as_of(self, step: int) -> None:
        self._problem = problem_of(self.metadata, name="the stream", step=step)
        self._solver: FcpSolver = solver_of(self._problem, max_degree=self.metadata.solver_options.get("max_degree"))

    def plan(self, window: Window) -> list[StepPlan]:
        """Plan the steps of a window."""
        for place, size in enumerate(window.sizes):
            if not size:
                raise PlanError(f"batch {window.first_step + place} of the stream is empty; a step needs a sequence")
        table = window.table
        checked_table("the stream", "length", table.length_tokens, {})
        self._require_room(window)
        in_order = self._plan_batches(window, np.arange(len(table)), offsets_of(window.sizes))
        if len(in_order) == 1:
            return self._keep(in_order, window)
        alike = self._plan_alike(window)
        return self._keep(alike if _seconds(alike) < _seconds(in_order) else in_order, window)

    def _plan_alike(self, window: Window) -> list[StepPlan]:
        """Plan the window's sequences by falling work: a long sequence's ring is then waited for in few steps."""
        work = batch_work(window.table, self._problem).total_seconds
        order = np.argsort(-work, kind="stable")
        offsets = offsets_of(window.sizes)
        batching = self.metadata.batching
        if batching is not None and batching.tokens is not None:
            offsets = offsets_by_tokens(window.table.length_tokens[order], batching.tokens)
        if len(offsets) != len(window.sizes) + 1:  # other numbers of steps are another schedule of learning rates
            return self._plan_batches(window, np.arange(len(order)), offsets_of(window.sizes))
        return self._plan_batches(window, order, offsets)

    def _plan_batches(self, window: Window, order: IntArray, offsets: IntArray) -> list[StepPlan]:
        steps = []
        for place in range(len(offsets) - 1):
            members = np.sort(order[offsets[place] : offsets[place + 1]])
            sequences = window.table.take(members)
            number = window.first_step + place
            batch = replace(
                batch_of(sequences, self._problem, step=number),
                rows=window.first_sequence + members,
                seed=step_seed(self.metadata.seed, number),
            )
            steps.append(assemble(self._solver.assign(batch), batch, self._problem))
        return steps

    def _keep(self, steps: list[StepPlan], window: Window) -> list[StepPlan]:
        for step in steps:
            self._refitter.keep(step, window.table.take(step.sequences - window.first_sequence))
        return steps

    def _require_room(self, window: Window) -> None:
        ranks, tokens = self._problem.num_ranks, self._problem.tokens_per_rank
        without_rings = "max_degree" in self._solver.options
        lengths = window.table.length_tokens
        longest = int(lengths.max())
        if longest > tokens * (1 if without_rings else ranks):
            holds = "without rings a rank holds" if without_rings else f"{ranks} ranks of {tokens} tokens hold"
            most = tokens if without_rings else ranks * tokens
            raise OverlongError(
                f"sequence {window.first_sequence + int(lengths.argmax())} of the stream has {longest} tokens; {holds} "
                f"at most {most}; leave it out of the stream, cut it, or plan with more tokens_per_rank or ranks"
            )


def _seconds(steps: Sequence[StepPlan]) -> float:
    return sum(step.makespan_seconds for step in steps)
