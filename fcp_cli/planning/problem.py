"""Inputs and outputs of a solver: a problem, a global batch, an assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.cost.recipe import Phase
from fcp_cli.plan.metadata import PlanMetadata, refitted
from fcp_cli.plan.pricing import padded_work
from fcp_cli.plan.setup import PlanSetup, Speeds, named_speeds
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.util.validation import fields_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(PlanSetup):
    """Settings that all steps of a plan share. `tokens_per_rank` is the token budget E of the papers.

    A rank is a model replica of `tensor_parallel` x `pipeline_parallel` devices, and the times and memory of the
    profile are those of such a rank. `num_ranks` ranks hold sequences; `encoder_ranks` more may follow them.

    With a `padding_multiple`, the token budget must be a multiple of it (`whole_budget`), which wastes nothing. A
    `Batch` holds sequences padded for a single rank; `work_on` adds the padding of wider groups.

    If all ranks of a wave share the encoder's work (`encoder_balance`), a `Batch` holds it separately. Packs and rings
    are then chosen for the language model only, since packing does not change the images that a rank encodes.

    Attributes:
        profile: prices of micro-batches, and of Ulysses groups if `attention` allows them.
        rank_speeds: rank speeds relative to the profile; None: all 1.
    """

    rank_speeds: Speeds | None = None
    profile: CostProfile

    @property
    def phase(self) -> Phase | None:
        """`forward` if micro-batches have no backward, else None (training)."""
        return self.profile.phase

    @property
    def all_ranks(self) -> int:
        """Number of ranks of the job, including encoder ranks."""
        return self.num_ranks + (self.encoder_ranks or 0)

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields of a plan's metadata that the problem determines."""
        return {
            **fields_of(PlanSetup, self),
            "num_ranks": self.all_ranks,
            "phase": self.phase,
            "rank_speeds": named_speeds(self.rank_speeds),
            "cost_profile": self.profile.text,
        }

    def __post_init__(self) -> None:
        if self.tokens_per_rank != whole_budget(self.tokens_per_rank, self.padding_multiple):
            raise ValueError(f"a token budget of {self.tokens_per_rank} is no multiple of {self.padding_multiple}")


def whole_budget(tokens_per_rank: int, padding_multiple: int | None) -> int:
    """Round a token budget down to the padding multiple: padded sequences can fill no more of it."""
    if padding_multiple is None:
        return tokens_per_rank
    return tokens_per_rank // padding_multiple * padding_multiple


def problem_of(metadata: PlanMetadata, *, name: str, step: int = 0) -> Problem:
    """Return the problem recorded in a plan's metadata.

    Args:
        metadata: the plan's metadata.
        name: name of the file in messages.
        step: step whose refit and rank speeds apply, for runs that plan while they train.
    """
    profile = parse_cost_profile(metadata.cost_profile, name=f"{name}: the plan's cost profile")
    shared = fields_of(PlanSetup, metadata)
    shared["num_ranks"] -= metadata.encoder_ranks or 0
    shared["tokens_per_rank"] = whole_budget(metadata.tokens_per_rank, metadata.padding_multiple)
    return Problem(**shared, rank_speeds=metadata.speeds_at(step), profile=refitted(profile, metadata.refit_at(step)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One global batch.

    Attributes:
        step: optimizer step.
        rows: [n] manifest rows.
        lengths: [n] tokens, after truncation.
        work: [n] work of each sequence on a single rank, with its padding; see `batches.batch_of`.
        encoder_seconds: [n] encoder seconds of each sequence on a single rank, if all ranks of a wave share them; None:
            they are part of `work`.
        seed: seed of the step, derived from the plan's; a solver's only source of randomness.
    """

    step: int
    rows: IntArray
    lengths: Int32Array
    work: Work
    encoder_seconds: FloatArray | None = None
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A solver's answer: groups and packs in one global order; times follow from the cost model.

    Micro-batch i runs the sequences `members[member_offsets[i]:member_offsets[i + 1]]` (positions in the batch, not
    manifest rows) on `ranks[rank_offsets[i]:rank_offsets[i + 1]]` (ascending). Idle rows are not listed.

    Attributes:
        wave: [microbatches] counted up from 0 under the sync `microbatch`, all -1 under `iteration`.
        heads_degree: [microbatches] Ulysses degree of each group; None: the fastest that the problem allows.
    """

    wave: Int32Array
    rank_offsets: IntArray
    ranks: Int32Array
    member_offsets: IntArray
    members: IntArray
    heads_degree: Int32Array | None = None


class Solver(Protocol):
    """Planner of one step at a time; the same batch must always give the same answer.

    A strategy that only `fcp compare` runs is a `StepPricer` instead, and one that pads its batches is also `Padded`.

    Attributes:
        name: the name in the registry of solvers.
        options: other settings that determine the answers, as JSON values for the plan's metadata.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    def assign(self, batch: Batch) -> Assignment:
        """Group the batch's sequences into micro-batches on ranks, within the token budget."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedStep:
    """Predicted step of a strategy whose execution a plan cannot express; see `spread_attention`.

    Attributes:
        seconds: predicted seconds of the step.
        bound_seconds: lower bound of any schedule with the same execution.
        busy_rank_seconds: seconds of all ranks together, without waiting.
    """

    seconds: float
    bound_seconds: float
    busy_rank_seconds: float


@runtime_checkable
class StepPricer(Protocol):
    """Strategy that prices its own execution, which a plan cannot express."""

    def price(self, batch: Batch) -> PricedStep:
        """Predict one step of the batch."""
        ...


def work_on(work: Work, degree: npt.ArrayLike, problem: Problem) -> Work:
    """Return the work of sequences padded for groups of `degree` ranks, not divided by it; the arguments broadcast."""
    return padded_work(work, degree, problem.padding_multiple, problem.profile)
