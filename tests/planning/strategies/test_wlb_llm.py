from __future__ import annotations

import os
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.strategies.wlb_llm import balanced_packs, make_solver, solver_of
from tests.planning.examples import example_problem, long_tail, one_batch, table_of


def _packed(tokens: list[int], *, number: int, limit: int) -> tuple[list[list[int]], list[int]]:
    lengths = np.array(tokens)
    packs, left = balanced_packs(lengths, lengths.astype(float) ** 2, number=number, limit=limit)
    return [[tokens[i] for i in pack] for pack in packs], [tokens[i] for i in left]


def test_a_sequence_goes_where_the_work_is_least_though_others_have_fewer_tokens() -> None:
    # 9 is as much work as 81 / 16 sequences of 4, which together have more tokens.
    assert _packed([9, 4, 4, 4, 4, 4], number=2, limit=100) == ([[9], [4, 4, 4, 4, 4]], [])


def test_a_full_pack_sends_it_to_the_fewest_tokens_and_what_fits_nowhere_is_left() -> None:
    assert _packed([8, 5, 4, 3], number=2, limit=9) == ([[8], [5, 4]], [3])


def test_groups_run_one_microbatch_more_where_a_sequence_finds_no_room() -> None:
    problem = example_problem("microbatch", num_ranks=2, tokens_per_rank=10)
    batch = batch_of(table_of([6, 6, 6, 2]), problem)  # 20 tokens, which two packs of 10 cannot take
    step = assemble(solver_of(problem, degree=1).assign(batch), batch, problem)
    assert step.tokens.max() <= 10
    assert sorted(step.sequences.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("sync", ["microbatch", "iteration"])
def test_the_degree_is_the_quickest_of_those_that_hold_the_longest(sync: Any) -> None:
    problem = example_problem(sync)
    batches = one_batch(long_tail(), problem)
    chosen, batch = make_solver(batches), batches.batch(0)
    assert chosen.seconds(batch) == min(solver_of(problem, degree).seconds(batch) for degree in (8, 16))


@pytest.fixture(scope="module")
def original() -> Any:
    """The function of the baseline's file, which imports only what it prints with."""
    file = Path(os.environ.get("FCP_DISTCA_SOURCE", ""), "distca/planner/wlb_planner.py")
    if not file.is_file():
        pytest.skip("opt-in: FCP_DISTCA_SOURCE names a checkout of hao-ai-lab/DistCA")
    found: dict[str, Any] = {"rich": types.SimpleNamespace(print=lambda *_: None), "print": lambda *_: None}
    exec(compile(file.read_text().replace("import rich", ""), str(file), "exec"), found)
    return found


def test_packs_equal_those_of_the_published_baseline_where_these_fit(original: Any) -> None:
    generator, ratio, compared = random.Random(0), 128 * 1024, 0
    for _ in range(300):
        number = generator.randint(2, 32)
        lengths = [128 * generator.randint(1, 200) for _ in range(generator.randint(number, 100))]
        limit = max(*lengths, int(sum(lengths) / number * generator.uniform(1, 2)))
        work = np.array([(length / ratio) ** 2 + length / ratio for length in lengths])
        packs, left = balanced_packs(np.array(lengths), work, number=number, limit=limit)
        if not left:
            theirs = original["balance_data_for_wlbllm"](number, 0, 0, 0, [lengths], Lmax=limit)[1]
            assert theirs == [[lengths[i] for i in pack] for pack in packs]
            compared += 1
    assert compared > 200
