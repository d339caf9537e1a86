from __future__ import annotations

import numpy as np
import pytest

from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.verdict import static_speedup
from tests.planning.examples import example_problem, long_tail


def planned(sync: Sync, solver_name: str, table: LengthTable) -> tuple[GlobalBatches, list[float], object]:
    batches = GlobalBatches(table, example_problem(sync), BatchSettings(global_batch_size=60))
    solver = make_solver(solver_name, batches)
    steps = [plan_step(batch, batches.problem, solver) for batch in batches]
    longest = int(table.length_tokens.max())
    found = static_speedup(steps, batches.problem, longest_tokens=longest, manifest=None)
    return batches, [step.makespan_seconds for step in steps], found


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_static_plan_gains_nothing_over_itself(sync: Sync) -> None:
    _, _, found = planned(sync, "static", long_tail())
    assert isinstance(found, tuple)
    assert found[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_the_gain_is_that_over_the_static_plan_of_the_same_batches(sync: Sync) -> None:
    _, static_seconds, _ = planned(sync, "static", long_tail())
    _, seconds, found = planned(sync, "fcp-paper", long_tail())
    assert isinstance(found, tuple)
    assert found[0] == pytest.approx(sum(static_seconds) / sum(seconds))


def test_without_the_manifest_the_gain_of_masked_sequences_is_not_known() -> None:
    table = long_tail()
    masked = LengthTable(name="m", length_tokens=table.length_tokens, eta=np.ones(len(table)))
    assert planned("iteration", "static", masked)[2] is None
