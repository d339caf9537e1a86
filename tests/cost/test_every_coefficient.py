"""Whoever scales coefficients names each of them: one that is new must be thought of in every place."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Heads
from fcp_cli.plan.metadata import Factors, ScheduledRefit, refitted
from fcp_cli.profiling.forward import forward_profile

# What a coefficient stays the same for: bytes where links are slower, what is no seconds at all.
NO_SECONDS = {
    *("ring_bytes_per_token", "last_hop_bytes_per_token", "halo_bytes_per_token"),
    *("window_tokens", "exposed_ring_share"),
}
NAMES = {one.name for one in fields(Coefficients)}
PROFILE = CostProfile(
    model="qwen3-vl-8b",
    cluster="example-8x8",
    origin="assumed",
    coefficients=Coefficients(**dict.fromkeys(NAMES, 0.5)),
    bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
    heads=Heads(
        query_heads=8,
        key_value_heads=8,
        exchange_bytes_per_token=0.5,
        key_value_exchange_bytes_per_token=0.5,
        exchange_seconds=0.5,
        host_exchange_seconds=0.5,
    ),
)


def changed(profile: CostProfile) -> set[str]:
    return {name for name, value in asdict(profile.coefficients).items() if value != 0.5}


def test_a_refit_changes_all_that_is_seconds() -> None:
    factors = Factors(microbatch=2.0, linear=3.0, attention=5.0, ring=7.0)
    after = refitted(PROFILE, ScheduledRefit(first_step=0, factors=factors))
    assert changed(after) == NAMES - NO_SECONDS
    assert PROFILE.heads is not None and after.heads == replace(
        PROFILE.heads, exchange_seconds=3.5, host_exchange_seconds=1.0
    )
    assert after.coefficients.ring_hop_seconds == after.coefficients.last_hop_seconds == 3.5


def test_a_forward_takes_less_of_all_that_a_training_step_pays() -> None:
    forward = forward_profile(replace(PROFILE, recipe=None))
    assert changed(forward) == NAMES - {"window_tokens", "exposed_ring_share"}
    assert max(asdict(forward.coefficients).values()) == 0.5
