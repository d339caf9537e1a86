"""The values that a solver takes and returns: a problem, a global batch, an assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import refitted
from fcp_cli.plan.pricing.setup import PlanSetup
from fcp_cli.plan.pricing.speeds import Speeds, named_speeds
from fcp_cli.recipe import Phase
from fcp_cli.validation import fields_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(PlanSetup):
    """All that is the same for every step of a plan. `tokens_per_rank` is the token budget E of the papers.

    A rank is a model replica of `tensor_parallel` x `pipeline_parallel` devices: the profile's times and memory are
    those of such a rank. `num_ranks` hold sequences; `encoder_ranks` may follow after them.

    Under a `padding_multiple` the token budget is a multiple of it (`whole_budget`), which loses nothing. A `Batch`
    holds the work and the tokens of sequences padded for one rank; `work` has the padding of wider groups.

    If all ranks of a wave share the encoder's work (`encoder_balance`), a `Batch` holds it apart: packs and rings
    are chosen only for the language model, since packing does not change the pictures that a rank encodes.

    Attributes:
        profile: prices micro-batches, and the splitting of heads if `attention` allows that.
        rank_speeds: the rank speeds of all ranks against the profile; None: all as it says.
    """

    rank_speeds: Speeds | None = None
    profile: CostProfile

    @property
    def phase(self) -> Phase | None:
        """`forward` if micro-batches have no backward; None: they train."""
        return self.profile.phase

    @property
    def all_ranks(self) -> int:
        """Ranks of the job, with those that only encode."""
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
    """Return the part of a token budget that padded sequences can fill: a rank holds such a multiple of each."""
    if padding_multiple is None:
        return tokens_per_rank
    return tokens_per_rank // padding_multiple * padding_multiple


def problem_of(metadata: PlanMetadata, *, name: str, step: int = 0) -> Problem:
    """Read the problem of a plan from its own metadata.

    Args:
        name: name of the file in messages.
        step: the step whose times and speeds hold, if they were measured anew while the run planned.
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
        work: per sequence, on a single rank; with padding, see `work.batch_work`.
        encoder_seconds: [n] of each sequence on a single rank, if all ranks of a wave share it; None: `work` has it.
        seed: differs per step, derived from the plan's seed; the only source of randomness.
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

    Micro-batch i runs the batch's sequences `members[member_offsets[i]:member_offsets[i + 1]]` (positions in the
    batch, not manifest rows) on `ranks[rank_offsets[i]:rank_offsets[i + 1]]` (ascending). Idle rows are dropped.
    `wave` counts up from 0 under the sync `microbatch`, and is -1 everywhere under `iteration`. `heads_degree` ranks of
    a group share heads; None: as many as is quickest among those that the problem allows.
    """

    wave: Int32Array
    rank_offsets: IntArray
    ranks: Int32Array
    member_offsets: IntArray
    members: IntArray
    heads_degree: Int32Array | None = None


class Solver(Protocol):
    """Plans one step at a time; the same batch always gives the same answer.

    Attributes:
        name: the name, as in the registry of solvers.
        options: other settings that determine its answers, for the plan's metadata: JSON values.
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
    """A step of a strategy whose execution no plan has, as its `price` predicts it.

    Attributes:
        seconds: the predicted seconds of the step.
        bound_seconds: the seconds that no schedule of the same execution beats.
        busy_rank_seconds: the busy seconds of all ranks, without waiting.
    """

    seconds: float
    bound_seconds: float
    busy_rank_seconds: float
