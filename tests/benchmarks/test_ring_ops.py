"""What a ring issues stays as little as it is, counted on meta tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.ring_ops import BEFORE, PACKS, count_pack, count_sent, predicted_sent

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("heads_degree", "ring_degree"), [(1, 2), (2, 2), (2, 3), (8, 1), (16, 1)])
def test_groups_send_what_the_cost_model_says(heads_degree: int, ring_degree: int) -> None:
    counted, predicted = count_sent(heads_degree, ring_degree), predicted_sent(heads_degree, ring_degree)
    assert counted.messages == predicted.messages
    # The member with most has a token more where ranks do not divide a sequence.
    assert counted.sent_bytes == pytest.approx(predicted.sent_bytes, rel=1e-3)


@pytest.mark.parametrize(("heads_degree", "ring_degree"), [(1, 2), (1, 4), (2, 3), (8, 1)])
def test_groups_send_the_halos_that_the_cost_model_says(heads_degree: int, ring_degree: int) -> None:
    counted, predicted = count_sent(heads_degree, ring_degree, 1024), predicted_sent(heads_degree, ring_degree, 1024)
    assert counted.messages == predicted.messages
    rings = counted.sent_bytes - predicted_sent(heads_degree, 1, 1024).sent_bytes * (heads_degree > 1)
    of_all = predicted.sent_bytes - predicted_sent(heads_degree, 1, 1024).sent_bytes * (heads_degree > 1)
    # The ends of a ring send less than those between, and the cost model has the mean.
    between = 1 if ring_degree < 3 else ring_degree / (ring_degree - 1)
    assert rings == pytest.approx(between * of_all, rel=1e-3)


@pytest.mark.parametrize("name", ["degree 2, 32 sequences", "degree 4, 500 sequences", "degree 8, one sequence"])
def test_a_ring_issues_less_than_it_did_at_first(name: str) -> None:
    lengths, degree = PACKS[name]
    before: dict[str, dict[str, Any]] = json.loads(BEFORE.read_text())["packs"][name]
    after = count_pack(lengths, degree)
    forward, backward, bf16 = (after[pass_] for pass_ in ("forward", "backward", "bf16"))
    assert forward.merge_bytes <= 0.6 * before["forward"]["merge_bytes"]
    assert forward.gathers + backward.gathers <= 2, "own rows are gathered once per pass, not per hop"
    assert forward.messages == degree - 1
    assert backward.messages == degree, "one a hop, and the last one home"
    assert backward.sent_bytes < before["backward"]["sent_bytes"]
    assert bf16.sent_bytes <= 0.65 * before["backward"]["sent_bytes"]
    assert forward.operations < before["forward"]["operations"]
    assert backward.operations <= before["backward"]["operations"]
