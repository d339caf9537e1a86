from __future__ import annotations

import ast
import math
import os
import random
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.planning.strategies.megatron_packing import packed_rounds


def _groups(lengths: list[int], *, num_ranks: int) -> list[list[tuple[int, list[int]]]]:
    rounds = packed_rounds(lengths, max_tokens_per_rank=1000, num_ranks=num_ranks)
    return [[(group.degree, group.sequences) for group in groups] for groups in rounds]


def test_a_sequence_takes_more_ranks_than_it_needs_where_that_relieves_the_busiest() -> None:
    # 900 needs one rank, as 1000 does, but on the two ranks that are left it ends sooner than on one.
    assert _groups([1000, 900], num_ranks=4) == [[(2, [0]), (2, [1])]]


def test_short_sequences_join_a_group_until_a_rank_is_full() -> None:
    ((first, second),) = _groups([800, 700, 200, 300], num_ranks=2)
    assert (first, second) == ((1, [0, 2]), (1, [1, 3]))


def test_what_no_rank_has_room_for_waits_for_the_next_microbatch() -> None:
    assert [len(groups) for groups in _groups([1000, 1000, 1000], num_ranks=2)] == [2, 1]


def test_ranks_that_no_doubling_can_fill_run_everything_on_one_group() -> None:
    assert _groups([1900, 1800], num_ranks=5) == [[(5, [0, 1])]]


@pytest.fixture(scope="module")
def original() -> Any:
    """The scheduler's function, cut out of its file, which imports what planning has no need of."""
    file = Path(os.environ.get("FCP_MEGATRON_LM_SOURCE", ""), "megatron/core/datasets/data_schedule_utils.py")
    text = file.read_text() if file.is_file() else ""
    if "next_hdp_group_packing_aware" not in text:
        pytest.skip("opt-in: FCP_MEGATRON_LM_SOURCE names a checkout of Megatron-LM's branch dev")
    wanted = ("next_hdp_group_packing_aware", "dcp_gpus_needed", "_DYNAMIC_CP_WORKLOAD_CAP_DELTA")
    parts = [part for part in ast.parse(text).body if _name_of(part) in wanted]
    found: dict[str, Any] = {**vars(typing), "ceil": math.ceil, "log2": math.log2, "lru_cache": lru_cache}
    exec(compile(ast.Module(parts, []), str(file), "exec"), found)
    return found[wanted[0]]


def _name_of(part: ast.stmt) -> str:
    """What a statement at the top of a file defines."""
    if isinstance(part, ast.Assign):
        return ast.unparse(part.targets[0])
    return part.name if isinstance(part, ast.FunctionDef) else ""


def test_random_batches_are_scheduled_as_by_the_original(original: Any) -> None:
    draw = random.Random(0)
    for _ in range(600):
        num_ranks = draw.choice([4, 6, 8, 12, 16, 32])
        most = 1000 << (num_ranks.bit_length() - 1)  # no longer than a power of two of ranks holds
        lengths = [min(max(1, int(draw.lognormvariate(6.2, 1.3))), most) for _ in range(draw.randint(1, 80))]
        expected, left = [], sorted(enumerate(lengths), key=lambda pair: pair[1], reverse=True)
        while left:
            _, left, _, of_ranks = original(left, num_ranks, max_seq_len_per_rank=1000)
            expected.append(of_ranks)
        found = [
            [sequences for degree, sequences in groups for _ in range(degree)]
            for groups in _groups(lengths, num_ranks=num_ranks)
        ]
        assert found == expected
