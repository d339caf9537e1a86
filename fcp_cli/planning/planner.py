"""The planner as an object: takes lengths, returns a planned step; planning reads and writes no files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import ManifestError, OverlongError, UsageError
from fcp_cli.manifest.table import LONGEST_TOKENS, LengthTable, checked_table
from fcp_cli.plan.metadata import OnlineOptions, OnlineSettings, Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.online import stream_batching, stream_metadata
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.recipe import unknown_lengths
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.planning.speeds import GivenSpeeds, speeds_words
from fcp_cli.util.console import Assumptions
from fcp_cli.util.validation import validated


class Planner:
    """Planner of global batches whose lengths are only known at run time; plans like `fcp plan`.

    The same lengths give the same step on every machine and in every process, so ranks can plan independently and agree
    without communication. The first call compiles all kernels that later calls need. A planner keeps no lengths between
    calls and may be called by several threads at once.

    Attributes:
        problem: the problem of every step, including assumed settings.
        assumed: assumptions for arguments that were not given: name -> value and reason.
    """

    def __init__(
        self,
        profile: Path | str | None = None,
        *,
        model: str | None = None,
        cluster: str | None = None,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        tokens_per_rank: int | None = None,
        sync: Sync | None = None,
        max_degree: int | None = None,
        phase: Literal["training", "forward"] = "training",
        rank_speeds: GivenSpeeds | None = None,
    ) -> None:
        """Resolve the planning problem; arguments correspond to the options of `fcp plan` with the same names.

        Args:
            profile: file of a cost profile; None: `profile.yaml` in the working directory, else one computed for
                `model` and `cluster`.
            model, cluster: name of a shipped one, or a YAML file.
            ranks: number of model replicas; None: that of the cluster.
            ranks_per_node: replicas per node; None: those of the cluster.
            tokens_per_rank: token budget of a rank in a micro-batch; None: derived from memory.
            sync: when ranks synchronize; None: `iteration` if it fits.
            max_degree: 1 forbids rings, for trainers that only distribute whole sequences; None: no limit.
            phase: `forward` plans passes without a backward, e.g. for log-probabilities.
            rank_speeds: rank speeds relative to the profile: one per rank, or by rank as `{12: 0.7}`; None: all 1.

        Raises:
            ProfileError: the profile, the model or the cluster cannot be used.
            UsageError: settings contradict each other or cannot be assumed.
        """
        request = PlanRequest(
            profile=None if profile is None else Path(profile),
            model=model,
            cluster=cluster,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            tokens_per_rank=tokens_per_rank,
            sync=sync,
            phase=phase,
            rank_speeds=speeds_words(rank_speeds),
        )
        assumptions = Assumptions()
        self.problem: Problem = resolve_problem(request, assumptions, data=unknown_lengths(max_degree))[0]
        self.assumed = assumptions.assumed
        self._solver = solver_of(self.problem, max_degree=max_degree)
        self._is_compiled = False
        self._most_tokens = self.problem.tokens_per_rank * (1 if max_degree == 1 else self.problem.num_ranks)

    def plan(
        self,
        lengths: npt.ArrayLike,
        *,
        eta: npt.ArrayLike | None = None,
        vision_patches: npt.ArrayLike | None = None,
        vision_patch_pairs: npt.ArrayLike | None = None,
        step: int = 0,
    ) -> StepPlan:
        """Plan one global batch; the step's `sequences` are positions in `lengths`.

        Args:
            lengths: [sequences] tokens, each at least 1.
            eta: [sequences] mask factor of the papers, 0 causal to 1 full; None: all causal.
            vision_patches, vision_patch_pairs: [sequences] as in a manifest; None: no vision.
            step: number of the planned step.

        Raises:
            ManifestError: no sequences, columns of different lengths, or a value out of range.
            OverlongError: a sequence is longer than all ranks (without rings: a single rank) can hold.
        """
        factors = {"eta": eta, "vision_patches": vision_patches, "vision_patch_pairs": vision_patch_pairs}
        table = _table(lengths, factors)
        longest = int(table.length_tokens.max())
        if longest > self._most_tokens:
            raise OverlongError(
                f"sequence {int(table.length_tokens.argmax())} of the batch has {longest} tokens; "
                f"{self._who_holds()} at most {self._most_tokens}"
            )
        if not self._is_compiled:
            self._solver.compile_ahead()
            self._is_compiled = True
        batch = batch_of(table, self.problem, step=step)
        return assemble(self._solver.assign(batch), batch, self.problem)

    def online(
        self,
        *,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        **options: Any,
    ) -> OnlineSettings:
        """Return the `planner` argument of `fcp_cli.runtime.start` for a stream with settings other than the defaults.

        Args:
            global_batch_size: sequences per optimizer step.
            global_batch_tokens: maximum tokens per optimizer step, instead. If neither is given, the stream must yield
                whole global batches.
            options: fields of `OnlineOptions`: ahead, stream_begins, refit_every.

        Raises:
            UsageError: both sizes are given, or a value is invalid.
        """
        batching = stream_batching(global_batch_size, global_batch_tokens)
        given = validated(options, OnlineOptions, where="the planner's settings cannot be used", error=UsageError)
        return OnlineSettings(
            metadata=stream_metadata(self.problem, self._solver, global_batch_size, batching), options=given
        )

    def _who_holds(self) -> str:
        ranks, tokens = self.problem.num_ranks, self.problem.tokens_per_rank
        if "max_degree" in self._solver.options:
            return "without rings (max_degree=1) a rank holds"
        return f"{ranks} ranks of {tokens} tokens hold"


def _table(lengths: npt.ArrayLike, factors: Mapping[str, npt.ArrayLike | None]) -> LengthTable:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not len(tokens):
        raise ManifestError(f"lengths have the shape {tokens.shape}; a step needs [sequences], at least one")
    if tokens.dtype.kind not in "iu":
        raise ManifestError(f"lengths are {tokens.dtype}; tokens are whole numbers")
    bad = np.flatnonzero((tokens < 1) | (tokens > LONGEST_TOKENS))
    if len(bad):
        raise ManifestError(f"lengths[{bad[0]}] is {tokens[bad[0]]}; a sequence has 1 to {LONGEST_TOKENS} tokens")
    given = {name: np.asarray(values) for name, values in factors.items() if values is not None}
    for name, column in given.items():
        if column.shape != tokens.shape:
            raise ManifestError(f"{name} has the shape {column.shape}; lengths have {tokens.shape}")
    return checked_table("the batch", "lengths", tokens.astype(np.int64), given)
