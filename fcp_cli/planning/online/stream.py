"""Planner of a stream's batches as they arrive, with the same result as `fcp plan` on the stream's manifest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from fcp_cli.errors import OverlongError, PlanError
from fcp_cli.manifest.table.checks import checked_table
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import ScheduledRefit
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batching.batches import batch_of, step_seed
from fcp_cli.planning.dataset.refitting import Refitter
from fcp_cli.planning.fcp.solver import FcpSolver, solver_of
from fcp_cli.planning.problem import problem_of


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
        batch = replace(
            batch_of(
                table.take(places), self._problem, step=step
            ),  # take copies: compiled code rejects Arrow's read-only arrays
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
