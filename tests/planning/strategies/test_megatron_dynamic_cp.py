from __future__ import annotations

import random
from typing import Any

import pytest

from fcp_cli.planning.strategies.megatron_dynamic_cp import balanced_rounds, degree_needed, make_solver
from tests.planning.examples import example_problem, first_step, one_batch


@pytest.mark.parametrize(("length", "degree"), [(1, 1), (1000, 1), (1001, 2), (2001, 4), (4000, 4), (4001, 8)])
def test_a_sequence_runs_on_the_smallest_power_of_two_that_holds_it(length: int, degree: int) -> None:
    assert degree_needed(length, 1000) == degree


def test_ranks_left_empty_double_the_smallest_group() -> None:
    ((group,),) = balanced_rounds([6000], max_tokens_per_rank=1000, num_ranks=32)
    assert (group.degree, group.sequences) == (32, [0])


def test_ranks_that_no_doubling_can_fill_stay_empty() -> None:
    ((group,),) = balanced_rounds([1500], max_tokens_per_rank=1000, num_ranks=6)
    assert group.degree == 4


def test_short_sequences_of_a_group_are_packed_where_that_is_quicker() -> None:
    problem = example_problem(num_ranks=1, ranks_per_node=1, tokens_per_rank=1000)
    step = first_step(one_batch([400, 300, 200], problem), make_solver)
    assert step.lengths.tolist() == [400, 300, 200] and len(step) == 1


class _ProcessGroup:
    """All that the original asks of a process group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # megatron-core warns about optional packages when it is imported
def test_the_rounds_are_those_of_the_original_scheduler() -> None:
    original: Any = pytest.importorskip(
        "megatron.core.pipeline_parallel.hybrid_cp_schedule",
        reason="compares with megatron-core, which fcp does not need: pip install megatron-core==0.16.1",
        exc_type=ImportError,
    )
    for seed in range(40):
        num_ranks, budget, lengths = _drawn_batch(seed)
        scheduler = original.BalancedCPScheduler(budget, _ProcessGroup(num_ranks))
        expected = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)[1]
        rounds = balanced_rounds(lengths, max_tokens_per_rank=budget, num_ranks=num_ranks)
        assert [[group.sequences for group in groups for _ in range(group.degree)] for groups in rounds] == expected


def _drawn_batch(seed: int) -> tuple[int, int, list[int]]:
    generator = random.Random(seed)
    num_ranks, budget = generator.choice([1, 2, 4, 8, 16, 64]), generator.choice([100, 1024, 8192])
    lengths = [int(generator.lognormvariate(7, 1.5)) for _ in range(generator.randint(1, 120))]
    return num_ranks, budget, [max(1, min(num_ranks * budget, length)) for length in lengths]
