"""What `make simgrid` hands to SimGrid is the plan: every second and every message of it."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.simgrid_replay.__main__ import NODES_PER_SWITCH, PER_NODE, planned_step, workload
from fcp_cli.plan.metadata import Sync


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_programs_have_the_seconds_of_their_micro_batches_and_messages_that_meet(sync: Sync) -> None:
    step, problem = planned_step("h100", 16, "commoncrawl", sync)
    programs = workload(step, problem, "alone", 4)["programs"]
    of_rows = {str(row.order): row for row in step.microbatches()}
    messages: Counter[tuple[str, int, int]] = Counter()
    for rank, program in enumerate(programs):
        for work in program:
            kernels = work["fixed_seconds"] + work["linear_seconds"] + work["attention_seconds"]
            row = of_rows[work["name"]]
            assert rank in row.ranks
            assert kernels <= row.seconds * (1 + 1e-9)
            if row.degree == 1:
                assert kernels == pytest.approx(row.seconds)
            else:
                messages[work["name"], rank, work["ring"]["to"]] += 1
                messages[work["name"], work["ring"]["from"], rank] -= 1
    assert sum(len(program) for program in programs) == sum(row.degree for row in of_rows.values())
    assert any(row.degree > 1 for row in of_rows.values()) and not any(messages.values())


def test_messages_between_nodes_share_ports_and_what_lies_above_their_switches() -> None:
    step, problem = planned_step("h100", 64, "commoncrawl", "microbatch")
    found = {network: workload(step, problem, network, 4) for network in ("alone", "rails", "fat tree")}
    for one, other, path in found["fat tree"]["routes"]:
        switches = {rank // PER_NODE // NODES_PER_SWITCH for rank in (one, other)}
        same_node = one // PER_NODE == other // PER_NODE
        assert len(path) == (2 if same_node or len(switches) == 1 else 4)
    for one, other, path in found["rails"]["routes"]:
        crosses_rails = one // PER_NODE != other // PER_NODE and one % PER_NODE != other % PER_NODE
        assert len(path) == (4 if crosses_rails else 2)
    assert len(found["alone"]["links"]) == len(found["alone"]["routes"])
