"""A pack takes the longer of what its device computes and what its host issues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.cost.explain import host_bound_tokens
from fcp_cli.cost.fitting import Sample, fit_profile, predicted_seconds
from fcp_cli.cost.model import causal_work, clocks, group_seconds
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, parse_cost_profile

HOST = """\
  host_microbatch_seconds: 2.0
  host_hop_seconds: 0.25
  host_last_hop_seconds: 0.125
"""
TEXT = """\
format: fcp-cost-profile/1
model: round-numbers
cluster: one-node
origin: assumed
coefficients:
  attention_seconds_per_token2: 0.0
  linear_seconds_per_token: 0.1
  ring_bytes_per_token: 12
  microbatch_seconds: 0.5
  ring_hop_seconds: 0.0625
{host}heads:
  query_heads: 4
  key_value_heads: 4
  exchange_bytes_per_token: 0.0
  key_value_exchange_bytes_per_token: 0.0
{exchange}bandwidth_bytes_per_second: {{intra_node: 1.0e+12, inter_node: 1.0e+12}}
"""


def profile_of(host: str = HOST, exchange: str = "  host_exchange_seconds: 0.5\n") -> CostProfile:
    return parse_cost_profile(TEXT.format(host=host, exchange=exchange), name="profile")


@pytest.mark.parametrize(
    ("tokens", "degree", "heads_degree", "seconds"),
    [
        (10, 1, 1, 2.0),  # the device takes 1.5
        (40, 1, 1, 4.5),  # and here longer than the host
        (10, 4, 1, 2.0 + 3 * 0.25 + 0.125),
        (10, 4, 2, 2.0 + 0.25 + 0.125 + 0.5),
        (10, 4, 4, 2.0 + 3 * 0.5),
        (120, 4, 1, 0.5 + 3.0 + 3 * 0.0625),
    ],
)
def test_a_pack_takes_the_longer_of_both_clocks(tokens: int, degree: int, heads_degree: int, seconds: float) -> None:
    profile = profile_of()
    work = causal_work(np.array([tokens]), profile.coefficients)
    place = {"degree": degree, "crosses_nodes": False, "heads_degree": heads_degree}
    assert group_seconds(profile, work, **place).tolist() == pytest.approx([seconds])
    blind = replace(
        profile,
        coefficients=replace(profile.coefficients, host_microbatch_seconds=0.0, host_hop_seconds=0.0),
    )
    assert clocks(profile, work, **place)[0] == clocks(blind, work, **place)[0]


def test_a_file_has_the_keys_of_the_host_only_if_it_is_priced() -> None:
    priced, blind = profile_of(), profile_of(host="", exchange="")
    assert "host" not in dump_cost_profile(blind)
    assert dump_cost_profile(priced).count("host_") == 4  # each but that of halos, which is 0
    assert parse_cost_profile(dump_cost_profile(priced), name="again") == priced


def samples_of(truth: CostProfile, packs: list[tuple[int, ...]]) -> list[Sample]:
    blank = [Sample(lengths=pack, degree=degree, seconds=1.0) for pack in packs for degree in (1, 2, 4)]
    return [replace(one, seconds=s) for one, s in zip(blank, predicted_seconds(blank, truth), strict=True)]


LONG, SHORT = [(4000,), (8000,), (16_000,), (4000, 4000)], [(100,), (200,), (400,), (50, 50)]


def wrong_by(truth: CostProfile, **factors: float) -> CostProfile:
    c = truth.coefficients
    return replace(truth, coefficients=replace(c, **{name: getattr(c, name) * by for name, by in factors.items()}))


def two_clocks() -> CostProfile:
    """A host of 100 ms, for which ranks wait below some 900 tokens."""
    profile = profile_of(exchange="")
    figures = {
        "attention_seconds_per_token2": 1e-8,
        "linear_seconds_per_token": 1e-4,
        "ring_bytes_per_token": 1e5,
        "microbatch_seconds": 0.001,
        "ring_hop_seconds": 0.001,
        "host_microbatch_seconds": 0.1,
        "host_hop_seconds": 0.02,
        "host_last_hop_seconds": 0.0,
    }
    return replace(profile, coefficients=replace(profile.coefficients, **figures))


def test_short_packs_determine_the_host_and_long_ones_the_device() -> None:
    truth = two_clocks()
    prior = wrong_by(truth, host_microbatch_seconds=3.0, linear_seconds_per_token=0.5)
    found = fit_profile(samples_of(truth, [*SHORT, *LONG]), prior).profile.coefficients
    assert found.host_microbatch_seconds == pytest.approx(0.1, rel=0.02)
    assert found.linear_seconds_per_token == pytest.approx(1e-4, rel=0.02)
    assert found.attention_seconds_per_token2 == pytest.approx(1e-8, rel=0.02)


def test_where_no_pack_waits_for_its_host_the_timed_one_stays() -> None:
    truth = two_clocks()
    found = fit_profile(samples_of(truth, LONG), wrong_by(truth, linear_seconds_per_token=0.5)).profile.coefficients
    assert found.host_microbatch_seconds == pytest.approx(0.1, rel=0.02)
    assert found.linear_seconds_per_token == pytest.approx(1e-4, rel=0.02)


def test_a_rank_waits_for_its_host_below_the_length_at_which_both_clocks_are_equal() -> None:
    truth = two_clocks()
    tokens = host_bound_tokens(truth)
    assert tokens is not None
    work = causal_work(np.array([round(tokens)]), truth.coefficients)
    on_device, host = clocks(truth, work, degree=1, crosses_nodes=False)
    assert on_device.tolist() == pytest.approx([float(host)], rel=1e-3)
    assert host_bound_tokens(profile_of(host="", exchange="")) is None
