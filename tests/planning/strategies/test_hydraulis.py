from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.planning.strategies.hydraulis import proposals, spread
from tests.planning.examples import example_problem


def test_a_long_sequence_goes_to_the_only_group_that_holds_it_and_the_rest_evens_out() -> None:
    seconds = np.array([[9.0, 1.0, 1.0, 1.0], [np.inf, 3.0, 3.0, 3.0]])
    assert spread(np.array([90, 10, 10, 10]), seconds, np.array([100, 20]), orders=5).tolist() == [0, 1, 1, 1]


def test_proposals_give_the_longest_wide_groups_and_hand_out_no_more_ranks_than_there_are() -> None:
    problem = example_problem("iteration", num_ranks=8, tokens_per_rank=100)
    tokens = np.array([50] * 30 + [390])
    seconds = np.array([tokens / 2 ** (power / 2) for power in range(4)], dtype=float)  # wide groups pay
    found = proposals(tokens, seconds, problem, 390)
    assert all(sum(degrees) <= 8 and list(degrees) == sorted(degrees, reverse=True) for degrees in found)
    assert (4, 1, 1, 1, 1) in found


@pytest.fixture(scope="module")
def original() -> Any:
    """The published greedy trial, with its own cost model's call replaced by a table."""
    file = Path(os.environ.get("FCP_HYDRAULIS_SOURCE", ""), "examples/strategy/dynamic_pulp.py")
    if not file.is_file():
        pytest.skip("opt-in: FCP_HYDRAULIS_SOURCE names a checkout of lhy101/Hydraulis")
    found = re.search(r"^def process_trial\(.*?(?=\ndef )", file.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    from functools import lru_cache

    names: dict[str, Any] = {"np": np, "random": random, "lru_cache": lru_cache, "tqdm": lambda x: x}
    names |= {"MINI_TRIAL_NUM": 50, "dynamic_strategy_time_cost": lambda pool, i, s: pool["table"][i][int(s)]}
    exec(found.group(0), names)
    return names["process_trial"]


def test_sequences_are_spread_as_by_the_published_trials(original: Any) -> None:
    generator, compared = random.Random(0), 0
    for _ in range(60):
        groups = generator.randint(2, 6)
        limits = sorted((generator.choice([100, 200, 400]) for _ in range(groups)), reverse=True)
        lengths = np.array([generator.randint(1, limits[0]) for _ in range(generator.randint(10, 40))])
        table = [{int(s): float(s) * float(s) / limit + 0.25 for s in lengths} for limit in limits]
        pool = {"strategies": [{"pp": 1}] * groups, "table": table}
        theirs = [original(0, lengths, pool, limits, list(range(groups)), group)[1] for group in range(groups)]
        if any(part is None for part in theirs):
            continue  # the original refuses an idle group
        seconds = np.array([[row[int(s)] for s in lengths] for row in table])
        ours = spread(lengths, seconds, np.array(limits), orders=50)
        assert [np.flatnonzero(ours == group).tolist() for group in range(groups)] == [sorted(p) for p in theirs]
        compared += 1
    assert compared > 30
