"""`--robust`: the rings of a wave that cross nodes are spread over the nodes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from benchmarks.disturbances import stressed_seconds
from benchmarks.workloads import family_table
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp.apart import MOST_LOSS
from fcp_cli.planning.solvers import make_solver
from tests.messages import raises
from tests.planning.examples import example_problem


def a_step(sync: Sync, **more: Any) -> GlobalBatches:
    problem = example_problem(sync, num_ranks=64, ranks_per_node=8, **more)
    table = family_table("github", sequences=512, seed=0)
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))


def test_spread_rings_cost_half_a_per_cent_at_most_and_share_fewer_links() -> None:
    batches = a_step("microbatch")
    batch, problem = batches.batch(0), batches.problem
    plain, spread = (make_solver("fcp", batches, robust=chosen).assign(batch) for chosen in (False, True))
    seconds = [makespan_seconds(answer, batch, problem) for answer in (plain, spread)]
    assert seconds[1] <= seconds[0] * (1 + MOST_LOSS)
    links = [stressed_seconds(answer, batch, problem)["shared link"] for answer in (plain, spread)]
    assert links[1] < 0.96 * links[0]
    assert np.array_equal(plain.members, spread.members)  # on other ranks, the same micro-batches
    assemble(spread, batch, problem)  # whole and legal


def test_robust_needs_waves_and_free_placement() -> None:
    with raises("UsageError: --robust moves rings to any ranks, which --max-peers limits; drop one of the two"):
        make_solver("fcp", a_step("microbatch"), robust=True, max_peers=4)
    with raises("UsageError: --robust spreads the rings of a wave, and --sync iteration plans no waves; drop --robust"):
        make_solver("fcp", a_step("iteration"), robust=True)
    with raises("UsageError: --robust works with --solver fcp only, not with static"):
        make_solver("static", cast(GlobalBatches, None), robust=True)
