"""A pack takes the longer of what its device computes and what its host issues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

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
