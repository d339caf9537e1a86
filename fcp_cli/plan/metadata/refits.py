"""Refits of the cost profile during online planning, stored in the plan's metadata by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from fcp_cli.plan.pricing.speeds import Speed, speeds_text
from fcp_cli.validation import NonNegativeCount

if TYPE_CHECKING:  # ranks read plans without importing the cost model
    from fcp_cli.cost.profile import CostProfile

MOST_FACTOR: Final = 10.0
"""By which a coefficient may leave the cost profile, up or down: beyond, something is broken that no plan mends."""

Factor = Annotated[
    float, Meta(ge=1 / MOST_FACTOR, le=MOST_FACTOR, description=f"from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors on the coefficients of a cost profile.

    Attributes:
        microbatch: factor on the fixed seconds of a micro-batch.
        linear: factor on the linear layers, recomputation and the vision encoder.
        attention: factor on attention, including windows and chunked states.
        ring: factor on communication: ring hops, halo messages, head exchange and inverse bandwidth.
    """

    microbatch: Factor = 1.0
    linear: Factor = 1.0
    attention: Factor = 1.0
    ring: Factor = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRefit:
    """Refit that applies from a step on, replacing the previous one.

    Attributes:
        first_step: first step planned with it.
        factors: factors on the cost profile's coefficients.
        rank_speeds: speeds of persistent stragglers; all other ranks keep the plan's speeds.
    """

    first_step: NonNegativeCount
    factors: Factors = field(default_factory=Factors)
    rank_speeds: Mapping[str, Speed] = field(default_factory=dict)


def refit_at(refits: Sequence[ScheduledRefit] | None, step: int) -> ScheduledRefit | None:
    """Return the last refit that begins at or before a step, or None."""
    return next((refit for refit in reversed(refits or ()) if refit.first_step <= step), None)


def refit_text(refit: ScheduledRefit) -> str:
    """Return a short description of a refit."""
    changed = [f"{name} x {factor:.3g}" for name, factor in asdict(refit.factors).items() if factor != 1.0]
    slow = [speeds_text(refit.rank_speeds)] if refit.rank_speeds else []
    return ", ".join([*changed, *slow]) or "as the profile says"


def refitted(profile: CostProfile, refit: ScheduledRefit | None) -> CostProfile:
    """Return the profile with a refit's factors applied."""
    if refit is None:
        return profile
    c, by = profile.coefficients, refit.factors
    bandwidth, heads = profile.bandwidth, profile.heads
    return replace(
        profile,
        heads=heads and replace(heads, exchange_seconds=heads.exchange_seconds * by.ring),
        recompute_levels=tuple(
            replace(level, seconds_per_token=level.seconds_per_token * by.linear) for level in profile.recompute_levels
        ),
        coefficients=replace(
            c,
            microbatch_seconds=c.microbatch_seconds * by.microbatch,
            linear_seconds_per_token=c.linear_seconds_per_token * by.linear,
            attention_seconds_per_token2=c.attention_seconds_per_token2 * by.attention,
            window_seconds_per_token2=c.window_seconds_per_token2 * by.attention,
            chunk_seconds_per_token=c.chunk_seconds_per_token * by.attention,
            vision_seconds_per_patch=c.vision_seconds_per_patch * by.linear,
            vision_seconds_per_patch2=c.vision_seconds_per_patch2 * by.linear,
            ring_hop_seconds=c.ring_hop_seconds * by.ring,
            last_hop_seconds=c.last_hop_seconds * by.ring,
            halo_message_seconds=c.halo_message_seconds * by.ring,
        ),
        bandwidth=replace(
            bandwidth, intra_node=bandwidth.intra_node / by.ring, inter_node=bandwidth.inter_node / by.ring
        ),
    )
