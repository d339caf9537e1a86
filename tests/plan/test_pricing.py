from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.pricing import step_prices
from fcp_cli.plan.setup import PlanSetup
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from tests.plan.steps import Row, make_step
from tests.planning.examples import example_problem, long_tail

SETUP = PlanSetup(num_ranks=3, ranks_per_node=2, sync="iteration", tokens_per_rank=100)
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
    seconds = step_prices(make_step(rows), SETUP, profile=profile).seconds
    alone = 0.5 + 0.1 * 30 + 0.01 * (100 + 400)
    inside = 0.5 + 0.1 * 15 + max(4.5, 12 * 30 / 2 / 10)
    across = 0.5 + 0.1 * 15 + 12 * 30 / 2 / 1
    assert seconds.tolist() == pytest.approx([alone, 0.0, inside, across])


def test_eta_comes_from_the_manifest_and_lengths_from_the_plan(profile: CostProfile) -> None:
    manifest = LengthTable(name="m", length_tokens=np.array([99, 99]), eta=np.array([0.0, 1.0]))
    step = make_step([Row([0], 0, 0, (10, 20))])
    seconds = step_prices(step, SETUP, profile=profile, manifest=manifest).seconds
    assert seconds.tolist() == pytest.approx([0.5 + 0.1 * 30 + 0.01 * (100 + 2 * 400)])


@pytest.mark.parametrize("padding_multiple", [None, 4])
def test_a_plan_states_bit_by_bit_what_its_own_rows_cost(tmp_path: Path, padding_multiple: int | None) -> None:
    table = long_tail(60)
    problem = example_problem(tokens_per_rank=8192, padding_multiple=padding_multiple)
    settings = BatchSettings(global_batch_size=20)
    make_plan(
        tmp_path / "plan.parquet",
        PlanInputs(table=table, problem=problem, settings=settings, request=PlanRequest(solver="fcp-paper")),
    )
    for step in PlanReader(tmp_path / "plan.parquet").steps():
        seconds = step_prices(step, problem, profile=problem.profile, manifest=table).seconds
        np.testing.assert_array_equal(seconds, step.seconds)
