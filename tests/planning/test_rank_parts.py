"""Steps on very many ranks are planned in parts that are alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import FAMILIES, MAX_LENGTH, example_profile, family_table
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning import searches
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.compiled.room_tree import first_with_room, make_tree, most_work, set_room, usable_seconds
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs
from fcp_cli.planning.problem import Batch, Problem
from tests.planning.examples import first_step, one_batch

_RANKS = 512


def _batches(table: LengthTable, sync: Sync = "iteration", ranks: int = _RANKS) -> GlobalBatches:
    problem = Problem(num_ranks=ranks, ranks_per_node=8, tokens_per_rank=16_384, sync=sync, profile=example_profile())
    return one_batch(table, problem)


def _parts(batch: Batch, batches: GlobalBatches) -> list[searches.RankPart]:
    _order, sequences = by_falling_work(batch.work)
    return searches.rank_parts(sequences, planner_inputs(batches.problem))


@pytest.mark.examples(3)
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_parts_is_sound_and_nearly_as_quick(family: str, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = family_table(family, sequences=4 * _RANKS, seed=0)
    table = replace(drawn, length_tokens=np.minimum(drawn.length_tokens, MAX_LENGTH))
    batches = _batches(table, sync)
    whole = first_step(batches)
    monkeypatch.setattr(searches, "_PART_RANKS", 128)
    monkeypatch.setattr(searches, "_UNLIKE", 0.1)
    assert len(_parts(batches.batch(0), batches)) == 4
    in_parts = first_step(batches)  # assembling proves the layout
    assert sorted(in_parts.sequences.tolist()) == list(range(4 * _RANKS))
    # Rings of 128 ranks at most, where the longest sequence of `wikipedia` alone would take more.
    assert in_parts.makespan_seconds <= 1.05 * whole.makespan_seconds
    rings = [row.ranks for row in in_parts.microbatches() if row.degree > 1]
    if sync == "microbatch" and family == "github":  # not another answer that competed
        assert rings and all(ranks[0] // 128 == ranks[-1] // 128 for ranks in rings)


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(min_value=8, max_value=40),
    last=st.integers(min_value=1, max_value=8),
    seed=st.integers(min_value=0, max_value=99),
)
def test_parts_share_out_all_sequences_and_whole_nodes_evenly(nodes: int, last: int, seed: int) -> None:
    ranks = 8 * (nodes - 1) + last
    lengths = np.random.default_rng(seed).integers(1, 40_000, 12 * ranks)
    batches = _batches(LengthTable(name="drawn", length_tokens=lengths), ranks=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searches, "_PART_RANKS", 16)
        patch.setattr(searches, "_UNLIKE", 0.1)
        parts = _parts(batches.batch(0), batches)
    assert len(parts) == ranks // 16
    assert sorted(np.concatenate([part.members for part in parts]).tolist()) == list(range(12 * ranks))
    ends = [part.first + part.inputs.num_ranks for part in parts]
    assert [part.first for part in parts] == [0, *ends[:-1]] and ends[-1] == ranks
    assert all(part.first % 8 == 0 for part in parts)
    shares = np.array([part.sequences.work.sum() / part.inputs.num_ranks for part in parts])
    assert shares.max() <= 1.1 * shares.mean()
    assert all((np.diff(part.sequences.work) <= 0).all() for part in parts)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([8_192] * (_RANKS - 1), id="fewer sequences than ranks"),
        pytest.param([130 * 16_384] + [8_192] * _RANKS, id="one that no part holds"),
        pytest.param([64 * 16_384] * 3 + [16] * _RANKS, id="three that hold all work"),
    ],
)
def test_a_step_whose_parts_would_differ_is_planned_whole(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "_PART_RANKS", 128)
    batches = _batches(LengthTable(name="unlike", length_tokens=np.array(lengths)))
    assert _parts(batches.batch(0), batches) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_seconds_that_no_sequence_can_fill_change_no_bin_that_is_found(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(min_value=1, max_value=20_000), min_size=1, max_size=30))
    batches = _batches(LengthTable(name="drawn", length_tokens=np.array(lengths)))
    _order, sequences = by_falling_work(batches.batch(0).work)
    inputs = planner_inputs(batches.problem)
    most = most_work(sequences, inputs)
    room = st.tuples(st.floats(min_value=-1.0, max_value=10.0), st.integers(min_value=-1, max_value=40_000))
    bins = data.draw(st.lists(room, min_size=1, max_size=20))
    tree = make_tree(len(bins))
    for b, (seconds, tokens) in enumerate(bins):
        set_room(tree, b, usable_seconds(seconds, tokens, most, inputs), tokens)
    for work, tokens in zip(sequences.work.tolist(), sequences.tokens.tolist(), strict=True):
        if tokens <= inputs.tokens_per_rank:
            fitting = [b for b, (free, left) in enumerate(bins) if free >= work and left >= tokens]
            assert first_with_room(tree, work, tokens, 0) == (fitting[0] if fitting else -1)
