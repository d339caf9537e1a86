from __future__ import annotations

import numpy as np
import pytest

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.plan.pricing import profile_seconds
from fcp_cli.simulation.run import simulate_plan
from fcp_cli.simulation.seconds import scattered_seconds
from tests.simulation.plans import Row, make_step

PROFILE = """
format: fcp-cost-profile/1
model: round-numbers
cluster: two-nodes
origin: assumed
coefficients:
  attention_seconds_per_token2: 0.01
  linear_seconds_per_token: 0.1
  ring_bytes_per_token: 12
  microbatch_seconds: 0.5
bandwidth_bytes_per_second: {intra_node: 10, inter_node: 1}
"""


@pytest.fixture
def profile() -> CostProfile:
    return parse_cost_profile(PROFILE, name="profile")


def test_a_profile_prices_packs_idle_rows_and_rings_across_nodes(profile: CostProfile) -> None:
    rows = [Row([0], 0, 0, (10, 20)), Row([1], 0, 0, ()), Row([0, 1], 0, 1, (30,)), Row([1, 2], 0, 1, (30,))]
    seconds = profile_seconds(make_step(rows), profile=profile, ranks_per_node=2)
    alone = 0.5 + 0.1 * 30 + 0.01 * (100 + 400)
    inside = 0.5 + 0.1 * 15 + max(4.5, 12 * 30 / 2 / 10)
    across = 0.5 + 0.1 * 15 + 12 * 30 / 2 / 1
    assert seconds.tolist() == pytest.approx([alone, 0.0, inside, across])


def test_eta_comes_from_the_manifest_and_lengths_from_the_plan(profile: CostProfile) -> None:
    manifest = LengthTable(name="m", length_tokens=np.array([99, 99]), eta=np.array([0.0, 1.0]))
    seconds = profile_seconds(
        make_step([Row([0], 0, 0, (10, 20))]), profile=profile, ranks_per_node=2, manifest=manifest
    )
    assert seconds.tolist() == pytest.approx([0.5 + 0.1 * 30 + 0.01 * (100 + 2 * 400)])


def test_noise_has_mean_one_and_depends_on_seed_and_step_only() -> None:
    step = make_step([Row([0], 1.0)] * 20_000)
    noisy = scattered_seconds(step, step.seconds, sigma=0.3, seed=1)
    assert noisy.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(noisy).std() == pytest.approx(0.3, abs=0.01)
    np.testing.assert_array_equal(noisy, scattered_seconds(step, step.seconds, sigma=0.3, seed=1))
    other = make_step([Row([0], 1.0)] * 20_000, step=1)
    assert not np.array_equal(noisy, scattered_seconds(other, other.seconds, sigma=0.3, seed=1))


def test_a_plan_is_simulated_with_its_own_times_another_profile_or_noise(profile: CostProfile) -> None:
    metadata = PlanMetadata(
        fcp_version="0",
        num_ranks=2,
        ranks_per_node=2,
        sync="iteration",
        global_batch_size=2,
        tokens_per_rank=64,
        seed=0,
        shuffle=False,
        solver="static",
        manifest=ManifestReference(name="m", rows=4, content_hash=""),
        cost_profile=PROFILE,
    )
    steps = [make_step([Row([0], 2.0), Row([1], 3.0)], step=i) for i in range(2)]
    assert [line.makespan_seconds for line in simulate_plan(steps, metadata)] == [3.0, 3.0]
    repriced = simulate_plan(steps, metadata, profile=profile)
    assert [line.makespan_seconds for line in repriced] == pytest.approx([0.5 + 0.8 + 0.64] * 2)
    noisy = [line.makespan_seconds for line in simulate_plan(steps, metadata, sigma=0.1)]
    assert noisy[0] != noisy[1] and all(makespan != 3.0 for makespan in noisy)
