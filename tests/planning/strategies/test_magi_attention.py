from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.planning.strategies.magi_attention import cut, dispatched


def test_a_chunk_spans_sequences_and_a_sequence_chunks() -> None:
    pieces = cut(np.array([5, 4]), 3)
    assert pieces.chunk.tolist() == [0, 1, 1, 2]
    assert pieces.sequence.tolist() == [0, 0, 1, 1]
    assert list(zip(pieces.start.tolist(), pieces.end.tolist(), strict=True)) == [(0, 3), (3, 5), (0, 1), (1, 4)]


def test_a_rank_with_its_share_of_chunks_gets_no_more_though_it_has_the_least_area() -> None:
    assert sorted(dispatched([9.0, 1.0, 1.0, 1.0], 2).tolist()) == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def original() -> Any:
    """The published greedy rule: the body of one method, which needs nothing but a heap and two helpers."""
    file = Path(os.environ.get("FCP_MAGI_ATTENTION_SOURCE", ""), "magi_attention/meta/solver/dispatch_solver.py")
    if not file.is_file():
        pytest.skip("opt-in: FCP_MAGI_ATTENTION_SOURCE names a checkout of SandAI-org/MagiAttention")
    found = re.search(r"    def _solve_with_minhp.*?(?=\n    def )", file.read_text(), flags=re.DOTALL)
    assert found is not None
    import heapq
    import textwrap
    from types import SimpleNamespace

    names: dict[str, Any] = {
        "heapq": heapq,
        "ceil_div": lambda a, b: -(-a // b),
        "argsort": lambda values: sorted(range(len(values)), key=values.__getitem__),
        "Any": Any,
        "DispatchData": Any,
        "DispatchJob": Any,
    }
    exec(textwrap.dedent(found.group(0)), names)

    def solve(areas: list[float], ranks: int) -> list[list[int]]:
        holder = SimpleNamespace()
        jobs = [SimpleNamespace(workload=area) for area in areas]
        names["_solve_with_minhp"](holder, SimpleNamespace(jobs=jobs, num_buckets=ranks))
        return [sorted(part) for part in holder.bucket_partitions]

    return solve


def test_chunks_go_to_the_ranks_of_the_published_dispatch(original: Any) -> None:
    generator = random.Random(0)
    for _ in range(500):
        ranks = generator.randint(1, 32)
        areas = [float(generator.randint(1, 60)) for _ in range(generator.randint(ranks, 200))]
        ours = dispatched(areas, ranks)
        assert [np.flatnonzero(ours == rank).tolist() for rank in range(ranks)] == original(areas, ranks)
