"""Layers that attend to a window: what they cost, fits of them, and where attention overtakes the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.cost.explain import break_even_tokens, seconds_table
from fcp_cli.cost.fitting import Sample, fit_profile, predicted_seconds
from fcp_cli.cost.formula import halo_messages
from fcp_cli.cost.model import attention_seconds, causal_work, group_seconds, group_terms, halo_seconds, windowed_pairs
from fcp_cli.cost.profile import Coefficients, CostProfile, dump_cost_profile, parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.runtime.layout import shard_layout

GEMMA = shipped_profile("gemma3-27b")


def _of(**changes: float) -> CostProfile:
    return replace(GEMMA, coefficients=replace(GEMMA.coefficients, **changes))


def _on_rings() -> CostProfile:
    """The profile of the same layers where rings carry them all, as before halos were priced."""
    return _of(halo_bytes_per_token=0.0)


def _attention(c: Coefficients, *lengths: float) -> list[float]:
    return list(attention_seconds(c, np.array(lengths)))


def test_a_window_costs_as_full_attention_within_it_and_grows_with_the_length_beyond() -> None:
    alone = _of(attention_seconds_per_token2=0.0).coefficients
    full = _of(attention_seconds_per_token2=alone.window_seconds_per_token2, window_seconds_per_token2=0.0).coefficients
    assert _attention(alone, 17, 1024) == pytest.approx(_attention(full, 17, 1024))
    once, twice, thrice = _attention(alone, 100_000, 200_000, 300_000)
    assert thrice - twice == pytest.approx(twice - once)
    assert once < 0.03 * _attention(full, 100_000)[0]


def test_windows_of_any_length_are_full_attention() -> None:
    c = GEMMA.coefficients
    wide = replace(c, window_tokens=1e9)
    both = replace(c, attention_seconds_per_token2=c.attention_seconds_per_token2 + c.window_seconds_per_token2)
    assert _attention(wide, 5000) == pytest.approx(_attention(replace(both, window_seconds_per_token2=0.0), 5000))


def test_a_profile_with_windows_is_written_and_read() -> None:
    assert parse_cost_profile(dump_cost_profile(GEMMA), name="x") == GEMMA
    assert "window" not in dump_cost_profile(shipped_profile("qwen3-8b"))


@pytest.mark.parametrize("full", [GEMMA.coefficients.attention_seconds_per_token2, 0.0])
def test_a_fit_scales_windows_with_what_is_measured_of_attention(full: float) -> None:
    truth = _of(attention_seconds_per_token2=full, window_seconds_per_token2=3e-8)
    packs = [(256, 256), (512,), (2048,), (4096, 4096), (30_000,), (16_384, 128), (100_000,)]
    samples = [Sample(lengths=pack, degree=1, seconds=1.0) for pack in packs]
    seconds = predicted_seconds(samples, truth)
    samples = [replace(sample, seconds=float(value)) for sample, value in zip(samples, seconds, strict=True)]
    prior = _of(attention_seconds_per_token2=full / 2, window_seconds_per_token2=1.5e-8)
    found = fit_profile(samples, prior).profile.coefficients
    assert found.window_seconds_per_token2 == pytest.approx(3e-8, rel=1e-3)
    assert found.attention_seconds_per_token2 == pytest.approx(full, rel=1e-3)


def test_attention_overtakes_the_rest_at_the_length_that_the_table_of_seconds_says() -> None:
    length = break_even_tokens(GEMMA)
    assert length is not None and length > GEMMA.coefficients.window_tokens
    alone = _of(linear_seconds_per_token=0.0, microbatch_seconds=0.0)
    linear = GEMMA.coefficients.linear_seconds_per_token * round(length)
    assert seconds_table(alone, [round(length)], [1])[0, 0] == pytest.approx(linear, rel=1e-4)
    assert break_even_tokens(_of(attention_seconds_per_token2=0.0)) is None  # windows alone never do


def _alone(profile: CostProfile, lengths: list[int], degree: int) -> float:
    pack = causal_work(np.array(lengths), profile.coefficients).packed(np.zeros(1, dtype=np.int64))
    return float(group_seconds(profile, pack, degree=degree, crosses_nodes=False)[0])


def test_a_profile_without_halos_costs_what_it_did_before_there_were_any() -> None:
    profile, length, degree = _on_rings(), 30_000.0, 8
    c = profile.coefficients
    attention = (
        c.attention_seconds_per_token2 * length**2
        + c.window_seconds_per_token2 * float(windowed_pairs(np.array(length), c.window_tokens))
    ) / degree
    ring = c.ring_bytes_per_token * length * (degree - 1) / degree / profile.bandwidth.intra_node
    expected = c.microbatch_seconds + c.linear_seconds_per_token * length / degree + max(attention, ring)
    assert _alone(profile, [30_000], degree) == pytest.approx(expected, rel=1e-14)


@pytest.mark.torch
@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("lengths", [[131_072], [9_000, 131_072], [50, 3_000, 20_001], [700]])
def test_rows_and_messages_of_halos_are_those_that_members_get(lengths: list[int], degree: int) -> None:
    from fcp_cli.runtime.windows import halo_of

    c = replace(GEMMA.coefficients, halo_message_seconds=0.0)
    reach = int(c.window_tokens) - 1
    layout = shard_layout(tuple(lengths), degree)
    halos = [halo_of(layout, index, reach) for index in range(degree)]
    windows = causal_work(np.array(lengths), c).packed(np.zeros(1, dtype=np.int64)).windows
    assert windows is not None
    free = _of(halo_message_seconds=0.0)
    priced = halo_seconds(free, windows, group_terms(free, degree=degree, crosses_nodes=False))
    rows = float(priced[0]) * GEMMA.bandwidth.intra_node / c.halo_bytes_per_token
    received = [halo.received for halo in halos]
    slack = 2 * len(lengths)  # chunks' sizes differ by a token
    assert np.mean(received) - slack <= rows <= max(received) + slack
    if min(lengths) / 2 / degree >= reach:
        assert rows == pytest.approx(np.mean(received))
    if degree == 2 or max(lengths) <= reach:
        assert rows == pytest.approx(max(received), abs=slack)
    sent = max(sum(len(messages) for messages in halo.rounds) for halo in halos)
    counted = float(halo_messages(degree, windows.shortest_tokens, reach)[0])
    assert counted == sent + (degree == 2 and min(lengths) < 4 * reach)  # whose members both have one neighbour


def test_halos_take_less_than_rings_of_long_sequences_and_hide_behind_nothing() -> None:
    slow = replace(GEMMA.bandwidth, intra_node=1e9)
    halos, rings = (replace(profile, bandwidth=slow) for profile in (GEMMA, _on_rings()))
    rings = replace(rings, coefficients=replace(rings.coefficients, ring_bytes_per_token=409_600.0 + 2_129_920.0))
    assert _alone(rings, [131_072], 8) > 1.5 * _alone(halos, [131_072], 8)
    c = halos.coefficients
    none = replace(halos, coefficients=replace(c, halo_bytes_per_token=1e-9))
    sent = c.halo_bytes_per_token * 2 * 1023 * 7 / 8 / 1e9
    assert _alone(halos, [131_072], 8) == pytest.approx(_alone(none, [131_072], 8) + sent)


def test_attention_in_windows_hides_no_ring_of_the_other_layers() -> None:
    profile = replace(GEMMA, bandwidth=replace(GEMMA.bandwidth, intra_node=1e8))  # a ring that outlasts attention
    dearer = replace(
        profile, coefficients=replace(profile.coefficients, window_seconds_per_token2=3e-8), bandwidth=profile.bandwidth
    )
    more = float(windowed_pairs(np.array(8192.0), 1024)) * (3e-8 - GEMMA.coefficients.window_seconds_per_token2)
    assert _alone(dearer, [8192], 4) == pytest.approx(_alone(profile, [8192], 4) + more / 4)


def test_a_message_of_a_halo_costs_its_seconds_in_each_round() -> None:
    dear = _of(halo_message_seconds=1.0)
    assert _alone(dear, [131_072], 8) == pytest.approx(_alone(GEMMA, [131_072], 8) + 2)
    assert _alone(dear, [131_072, 4096], 8) == pytest.approx(_alone(GEMMA, [131_072, 4096], 8) + 8)
    assert _alone(dear, [131_072, 1024], 8) == pytest.approx(_alone(GEMMA, [131_072, 1024], 8) + 9)
    assert _alone(dear, [131_072], 1) == _alone(GEMMA, [131_072], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_tokens": 0.0}, "coefficients.halo_bytes_per_token is 2.12992e\\+06, and .window_tokens is missing"),
        (
            {"halo_bytes_per_token": 0.0, "halo_message_seconds": 0.5},
            "coefficients.halo_message_seconds is 0.5, and .halo_bytes_per_token is missing",
        ),
    ],
)
def test_halos_of_nothing_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_cost_profile(dump_cost_profile(_of(**changes)), name="x")


def test_a_fit_finds_the_bandwidth_at_which_rings_and_halos_go() -> None:
    truth = replace(_of(halo_message_seconds=0.01), bandwidth=replace(GEMMA.bandwidth, intra_node=3e9))
    packs = [(256, 256), (512,), (2048,), (4096, 4096), (30_000,), (16_384, 128), (100_000,)]
    samples = [Sample(lengths=pack, degree=degree, seconds=1.0) for pack in packs for degree in (1, 4)]
    seconds = predicted_seconds(samples, truth)
    samples = [replace(sample, seconds=float(value)) for sample, value in zip(samples, seconds, strict=True)]
    prior = replace(truth, bandwidth=replace(GEMMA.bandwidth, intra_node=9e9))
    assert fit_profile(samples, prior).profile.bandwidth.intra_node == pytest.approx(3e9, rel=0.02)
    only = replace(prior, coefficients=replace(prior.coefficients, ring_bytes_per_token=0.0))
    assert fit_profile(samples, only).profile.bandwidth.intra_node > 0
