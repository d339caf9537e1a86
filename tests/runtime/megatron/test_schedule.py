"""megatron-core's interleaved schedule: in the planner's order, and without a circle where stages wait for lengths."""

from __future__ import annotations

import json

import pytest

from fcp_cli.plan.simulation.pipeline import device_order
from tests.runtime.launch import forked

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 2), (2, 2, 6), (4, 2, 8), (4, 3, 12)])
def test_every_stage_takes_chunks_through_micro_batches_in_megatrons_order(
    stages: int, chunks: int, microbatches: int
) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(microbatches, chunks, stages)
    blocks = stages * chunks
    for codes in device_order(stages, chunks, microbatches).tolist():
        work = [(code // (2 * blocks), code % (2 * blocks) // 2 // stages, code % 2) for code in codes]
        assert [(microbatch, chunk) for microbatch, chunk, is_backward in work if not is_backward] == table
        backwards = [(microbatch, chunks - 1 - chunk) for microbatch, chunk, is_backward in work if is_backward]
        assert backwards == table


@pytest.mark.processes
def test_only_stages_that_exchange_both_directions_at_once_wait_for_lengths_in_a_circle() -> None:
    """In a step of as many micro-batches as stages; see `schedule_worker`."""
    sizes = [(stages, chunks) for stages in (2, 3, 4, 8) for chunks in (2, 3)]
    wanted = [f"{p},{v},{m},{kind}" for p, v in sizes for m in (p, 3 * p) for kind in ("one", "ahead")]
    printed = forked("tests.runtime.megatron.schedule_worker", *wanted, "4,2,8,both", "4,2,4,both")
    assert json.loads(printed.splitlines()[-1]) == {
        **dict.fromkeys([*wanted, "4,2,8,both"], True),
        "4,2,4,both": False,
    }
