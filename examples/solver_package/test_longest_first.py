"""How to test a solver without the command line: `assemble` raises if an answer breaks a rule of plans."""

from typing import Literal

import pytest
from longest_first import make_solver

from fcp_cli import Planner
from fcp_cli.extend import assemble, batches_of


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_every_sequence_is_planned_within_the_token_budget(sync: Literal["iteration", "microbatch"]) -> None:
    problem = Planner(model="qwen3-8b", cluster="h100-8x8", ranks=12, tokens_per_rank=4096, sync=sync).problem
    batches = batches_of([40_000, 9_000, 5_000, *range(100, 2_000, 50)], problem)
    batch = batches.batch(0)
    step = assemble(make_solver(batches).assign(batch), batch, problem)
    assert step.bound_seconds <= step.makespan_seconds < 3 * step.bound_seconds
