"""All ranks that a plan's rings join meet before the first step, in rounds that cannot deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.rings import ring_order
from fcp_cli.plan.step import RingGroup
from fcp_cli.runtime import connections
from fcp_cli.runtime.connections import (
    Connections,
    HaloPattern,
    contacts_of,
    expect_halo_pattern,
    hops_of,
    planned_hops,
    rounds_of,
)
from fcp_cli.runtime.cursor import PlanCursor
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.recurrent import short_convolution, states_at_chunks
from fcp_cli.runtime.ring import Ring
from fcp_cli.verification.emulation import Meeting, ThreadTransport, ThreadWorld, run_ranks
from fcp_cli.verification.order import Operation, check_order
from fcp_cli.verification.recording import RecordingTransport
from fcp_cli.verification.verify import replay_processes
from tests.plan.counted_peers import plan_peers
from tests.runtime.emulation import run_recorded
from tests.runtime.plans import Row, random_steps, write_plan
from tests.runtime.reference import make_example

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def connections_of(meeting: Meeting, process: int, rank: int, **peers: Any) -> tuple[Connections, RecordingTransport]:
    """Those of a rank, and what it sends and receives."""
    transport = RecordingTransport(ThreadTransport(meeting.mailbox, process, timeout_seconds=20.0))
    return Connections(transport, rank=rank, device=CPU, **peers), transport


@settings(max_examples=100)
@given(st.sets(st.tuples(st.integers(0, 15), st.integers(0, 15)).filter(lambda hop: hop[0] != hop[1])))
def test_in_a_round_every_rank_meets_one_other_at_most(hops: set[tuple[int, int]]) -> None:
    rounds = rounds_of(hops)
    assert set(rounds) == {(min(hop), max(hop)) for hop in hops}
    places = [(number, rank) for pair, number in rounds.items() for rank in pair]
    assert len(places) == len(set(places))
    most = max((sum(rank in pair for pair in rounds) for rank in range(16)), default=0)
    assert len(set(rounds.values())) <= max(2 * most - 1, 0)


@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(0, 10**6))
def test_ranks_meet_over_exactly_the_ways_that_rings_will_use(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int, seed: int
) -> None:
    plan = tmp_path_factory.mktemp("plan") / "plan.parquet"
    write_plan(plan, random_steps(num_ranks, 3, sync="iteration", seed=seed), num_ranks=num_ranks)
    lines: list[str] = []

    def run(meeting: Meeting, rank: int) -> tuple[Operation, ...]:
        met, transport = connections_of(meeting, rank, rank)
        met.open_all(planned_hops(plan), report=lines.append if rank == 0 else None)
        assert met.peers_met == len(contacts_of(rank, planned_hops(plan)))
        return tuple(transport.operations)

    operations = dict(enumerate(run_ranks(num_ranks, run)))
    check_order(operations)
    sent = {(rank, op.peer) for rank, issued in operations.items() for op in issued if op.verb == "send"}
    used = set()
    for rank in range(num_ranks):
        for step in PlanCursor(plan, rank, ahead=0):
            for row in step.rows:
                at = row.ranks.index(rank)
                used |= {(rank, row.ranks[(at + 1) % row.degree])} if row.degree > 1 else set()
    assert sent == used
    pairs = plan_peers(plan).pairs
    assert {(min(way), max(way)) for way in sent} == set(pairs)
    assert len(lines) == (1 if pairs else 0)


def test_ranks_of_a_plan_may_be_processes_of_other_numbers(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0, 1], [9]), Row([2], [3])]], num_ranks=3)

    def run(meeting: Meeting, process: int) -> int:
        met, _ = connections_of(meeting, process, 2 - process, peers=(2, 1, 0))
        met.open_all(planned_hops(plan))
        return met.peers_met

    assert run_ranks(3, run) == [0, 1, 1]


GROUPS = [((0, 1, 2, 3, 4), 8, 1), (tuple(range(8)), 4, 1), ((0, 1, 2, 3, 4, 5), 8, 2), (tuple(range(8)), 4, 4)]


@pytest.mark.parametrize(("ranks", "per_node", "heads_degree"), GROUPS)
def test_layers_that_look_back_use_no_way_that_was_not_opened(
    ranks: tuple[int, ...], per_node: int, heads_degree: int
) -> None:
    group = RingGroup(np.array(ranks, dtype=np.int32).tobytes(), heads_degree)
    order = ring_order(ranks, per_node, heads_degree)
    of_rings, up_and_down, opened = (
        hops_of([group], per_node, halo_pattern=how) for how in ("no", "rings", "whole heads")
    )
    windows = run_recorded(make_example((90, 700), (8, 4), window=7), order, heads_degree=heads_degree)[1]
    layout = shard_layout((90, 700), len(ranks), heads_degree)

    def run(meeting: Meeting, rank: int) -> tuple[Operation, ...]:
        place, transport = order.index(rank), RecordingTransport(ThreadTransport(meeting.mailbox, rank, 20.0))
        ring = Ring(layout, place, order, transport)
        rows = torch.ones(1, 3, layout.tokens(place), requires_grad=True)
        torch.autograd.backward(short_convolution(lambda given: given * 2, rows, 4, ring).sum())
        states = torch.ones(2, 2, 8, 4, 4, requires_grad=True)
        torch.autograd.backward(states_at_chunks(ring.ring_of_head_group(), states, states).sum())
        return tuple(transport.operations)

    linear = dict(enumerate(run_ranks(len(ranks), run)))
    of_windows, of_linear = (
        {(rank, one.peer) for rank, issued in operations.items() for one in issued if one.verb == "send"}
        for operations in (windows, linear)
    )
    assert of_windows <= up_and_down and of_linear <= opened
    assert not of_linear <= of_rings
    assert len(ranks) == 2 * heads_degree or not of_windows <= of_rings  # in a ring of two, both ways are its own


def test_a_session_opens_ways_back_where_any_model_looks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0, 1, 2], [40])]], num_ranks=3)
    assert planned_hops(plan, halo_pattern="rings") > planned_hops(plan)
    monkeypatch.setattr(connections, "_expected", set())
    kinds: tuple[HaloPattern, ...] = "no", "rings", "whole heads"
    for kind in kinds:
        expect_halo_pattern(kind)

        def run(meeting: Meeting, rank: int) -> set[tuple[int, int]]:
            met, transport = connections_of(meeting, rank, rank)
            met.open_all(planned_hops(plan))
            met.halo_pattern = connections.agree_on_halo_pattern(ThreadWorld(meeting, rank))
            met.open_all(planned_hops(plan, halo_pattern=met.halo_pattern))
            return {(rank, operation.peer) for operation in transport.operations if operation.verb == "send"}

        assert set().union(*run_ranks(3, run)) == planned_hops(plan, halo_pattern=kind)


@pytest.mark.distributed
def test_no_pair_of_processes_meets_for_the_first_time_in_a_step(tmp_path: Path) -> None:
    steps = [[Row([0, 1, 2, 3], [40], heads_degree=2), Row([0, 3], [9])], [Row([1, 2, 3], [9]), Row([0], [4])]]
    plan = write_plan(tmp_path / "plan.parquet", steps, num_ranks=4)
    met = set()
    for rank, replayed in enumerate(replay_processes(plan)):
        messages = [operation for operation in replayed.operations if not operation.is_collective]
        first = next(place for place, message in enumerate(messages) if message.content in ("kv", "heads"))
        parts = messages[:first], messages[first:]
        before, after = ({(message.verb, message.peer) for message in part} for part in parts)
        assert before == after
        met |= {(min(rank, peer), max(rank, peer)) for _verb, peer in before}
    assert sorted(met) == plan_peers(plan).pairs
