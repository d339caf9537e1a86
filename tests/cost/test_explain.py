"""What `fcp profile show` derives from a profile agrees with the cost formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.cost.explain import Tier, hidden_ring_tokens
from fcp_cli.cost.model import causal_work, pack_parts
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.report.profiles import reading


@pytest.mark.parametrize("tier", ["intra_node", "inter_node"])
@pytest.mark.parametrize("degree", [2, 8])
def test_attention_hides_a_ring_from_the_length_that_the_formula_says(degree: int, tier: Tier) -> None:
    shipped = shipped_profile("qwen3-8b")
    last_hop_bytes = 0.5 * shipped.coefficients.ring_bytes_per_token
    last_hop = {"last_hop_bytes_per_token": last_hop_bytes, "last_hop_seconds": 1e-4, "chunk_seconds_per_token": 1e-6}
    coefficients = replace(shipped.coefficients, ring_hop_seconds=1e-4, exposed_ring_share=0.2, **last_hop)
    profile = replace(shipped, coefficients=coefficients)
    length = hidden_ring_tokens(profile, degree=degree, tier=tier)
    assert length is not None
    work = causal_work(np.array([round(length)]), profile.coefficients)
    parts = pack_parts(profile, work, degree=degree, crosses_nodes=tier == "inter_node")
    assert parts.attention[0] == pytest.approx(parts.hidden[0], rel=1e-3)


def test_a_profile_that_prices_an_exposed_last_hop_is_said_to_be_of_other_rings() -> None:
    shipped = shipped_profile("qwen3-8b")
    earlier = replace(shipped, coefficients=replace(shipped.coefficients, last_hop_seconds=1e-4))
    assert not any(line.startswith("Last hop:") for line in reading(shipped, [2]))
    assert [line for line in reading(earlier, [2]) if line.startswith("Last hop: priced as exposed")]
