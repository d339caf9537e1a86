"""The call sites of other trainers, answered by our prices: their arguments, their answers, and what they rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli import Planner
from fcp_cli.planning.drafts import partition
from fcp_cli.planning.rollouts.levelling import level_packs, level_parts
from fcp_cli.planning.rollouts.slime import build_dp_schedule
from fcp_cli.planning.rollouts.verl import VerlBalancing, lengths_of_workloads
from fcp_cli.util.arrays import FloatArray, IntArray
from tests.messages import raises
from tests.planning.examples import PROFILE

RANKS, MOST_TOKENS = 8, 8192


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    path = tmp_path_factory.mktemp("splits") / "profile.yaml"
    path.write_text(PROFILE)
    return Planner(path, ranks=RANKS, ranks_per_node=4, tokens_per_rank=MOST_TOKENS, sync="iteration")


def drawn(count: int, seed: int = 0, longest: int = MOST_TOKENS) -> IntArray:
    return np.random.default_rng(seed).lognormal(7.5, 0.9, count).clip(2, longest).astype(np.int64)


@settings(max_examples=40)
@given(
    seconds=st.lists(st.floats(0.01, 9.0), min_size=6, max_size=40),
    parts=st.integers(1, 6),
    equal_counts=st.booleans(),
)
def test_exchanges_leave_no_part_empty_and_none_slower_than_differencing_alone(
    seconds: list[float], parts: int, equal_counts: bool
) -> None:
    work = np.array(seconds[: len(seconds) // parts * parts])
    found = level_parts(work, parts, equal_counts=equal_counts)
    assert sorted(item for part in found for item in part) == list(range(len(work)))
    sizes = {len(part) for part in found}
    assert min(sizes) > 0 and (len(sizes) == 1 or not equal_counts)
    if all(before := partition(work.tolist(), parts, equal_counts=equal_counts)):
        assert slowest(found, work) <= slowest(before, work) * (1 + 1e-9)


def slowest(parts: list[list[int]], work: FloatArray) -> float:
    return float(max(work[part].sum() for part in parts))


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), packs=st.integers(1, 12))
def test_packs_hold_no_more_than_they_may(seed: int, packs: int) -> None:
    tokens = drawn(24, seed)
    found = level_packs(tokens.astype(float) ** 2, tokens, packs, MOST_TOKENS)
    if found is None:
        assert packs * MOST_TOKENS < 2 * tokens.sum()  # first-fit decreasing fills half of all but one pack
    else:
        assert len(found) == packs and all(found)
        assert sorted(item for pack in found for item in pack) == list(range(24))
        assert all(tokens[pack].sum() <= MOST_TOKENS for pack in found)


def test_verls_trainer_gets_equally_many_sequences_for_each_rank_of_about_equal_seconds(planner: Planner) -> None:
    lengths = drawn(64)
    parts = VerlBalancing(planner).get_seqlen_balanced_partitions((24576 * lengths + lengths**2).tolist(), 8, True)
    assert sorted(one for part in parts for one in part) == list(range(64))
    assert {len(part) for part in parts} == {8} and all(part == sorted(part) for part in parts)
    costs = planner.problem.profile.coefficients
    work = costs.attention_seconds_per_token2 * lengths.astype(float) ** 2 + costs.linear_seconds_per_token * lengths
    assert slowest(parts, work) <= 1.02 * work.sum() / 8


def test_verl_is_told_what_it_passed_that_cannot_be_spread(planner: Planner) -> None:
    balancing = VerlBalancing(planner)
    with raises("UsageError: 3 sequences cannot be spread over 4 parts; give one for each at least"):
        balancing.get_seqlen_balanced_partitions([24577.0] * 3, 4, False)
    with raises("UsageError: 6 sequences are no multiple of the 4 parts, which need equal numbers"):
        balancing.get_seqlen_balanced_partitions([24577.0] * 6, 4, True)
    with raises(
        "UsageError: item 1 is 1000, which is 24576 L + L^2 of no length L; pass what verl's calculate_workload returns"
    ):
        balancing.get_seqlen_balanced_partitions([24577, 1000], 2, False)


def test_workloads_of_any_length_are_read_back_even_in_single_precision() -> None:
    lengths = np.unique(np.geomspace(1, 1_000_000, 200).astype(np.int64))
    workloads = (24576 * lengths + lengths**2).astype(np.float32)
    assert lengths_of_workloads(workloads.tolist()).tolist() == lengths.tolist()


@pytest.mark.torch
def test_verls_workers_get_the_fewest_micro_batches_and_their_positions(planner: Planner) -> None:
    import torch

    def select(batch: Any, positions: list[int]) -> Any:
        return {"lengths": batch["attention_mask"][positions].sum(dim=1).tolist()}

    lengths = drawn(30, longest=4000)
    mask = torch.arange(4000)[None] < torch.from_numpy(lengths)[:, None]
    batch = {"input_ids": torch.zeros(30, 4000, dtype=torch.int8), "attention_mask": mask}
    balancing = VerlBalancing(planner, select=select)
    found, positions = balancing.rearrange_micro_batches(batch, MOST_TOKENS, same_micro_num_in_dp=False)
    assert sorted(one for pack in positions for one in pack) == list(range(30))
    assert [one["lengths"] for one in found] == [lengths[pack].tolist() for pack in positions]
    assert len(found) == -(-lengths.sum() // MOST_TOKENS)
    assert all(lengths[pack].sum() <= MOST_TOKENS for pack in positions)
    pairs = balancing.rearrange_micro_batches(batch, MOST_TOKENS, num_batches_divided_by=4, force_group_size=2)[1]
    assert len(pairs) % 4 == 0 and all(pack[at] + 1 == pack[at + 1] for pack in pairs for at in range(0, len(pack), 2))
    with raises("UsageError: a sequence has 4000 tokens; a micro-batch holds 3000 (max_token_len)"):
        balancing.rearrange_micro_batches(batch, 3000)
    with raises("UsageError: 40 micro-batches are needed, but a rank has 30 sequences for them"):
        balancing.rearrange_micro_batches(batch, MOST_TOKENS, min_num_micro_batch=40)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")  # of engines that are not installed
def test_verls_own_code_runs_on_our_answers(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    import torch
    from tensordict import TensorDict  # type: ignore[import-not-found, unused-ignore]
    from verl.utils import tensordict_utils as tu  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.engine import utils  # type: ignore[import-not-found, unused-ignore]

    lengths = drawn(20, longest=3000)
    rows = [torch.full((int(length),), number) for number, length in enumerate(lengths)]
    batch = TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=20)
    tu.assign_non_tensor(batch, use_dynamic_bsz=True, max_token_len_per_gpu=MOST_TOKENS, sp_size=1)
    monkeypatch.setattr(utils, "rearrange_micro_batches", VerlBalancing(planner).rearrange_micro_batches)
    found, positions = utils.prepare_micro_batches(batch)
    for part, pack in zip(found, positions, strict=True):
        assert [int(row[0]) for row in part["input_ids"].unbind()] == pack
        assert [len(row) for row in part["input_ids"].unbind()] == lengths[pack].tolist()
    assert sorted(one for pack in positions for one in pack) == list(range(20))


@dataclass
class SlimeArguments:
    max_tokens_per_gpu: int | None = MOST_TOKENS
    use_dynamic_batch_size: bool = True


def parallel(**given: int) -> dict[str, int]:
    return {"dp_size": 4, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1, **given}


@pytest.mark.parametrize("vpp_size", [1, 2])
def test_slimes_ranks_run_equally_many_micro_batches_and_every_sample_once(planner: Planner, vpp_size: int) -> None:
    lengths, rollouts = drawn(150, longest=MOST_TOKENS), (np.arange(150) // 2).tolist()
    config = parallel(vpp_size=vpp_size, microbatch_group_size_per_vp_stage=2)
    samples, packs, numbers, sizes = build_dp_schedule(
        planner, SlimeArguments(), config, lengths.tolist(), global_batch_size=30, rollout_indices=rollouts
    )
    assert sizes == [30, 30] and len(numbers) == 2  # the last 15 rollouts fill no step
    assert sorted(one for rank in samples for one in rank) == list(range(120))
    for rank, its_packs in zip(samples, packs, strict=True):
        assert len(its_packs) == sum(numbers)
        assert [one for pack in its_packs for one in pack] == list(range(len(rank)))
        assert all(pack and lengths[[rank[at] for at in pack]].sum() <= MOST_TOKENS for pack in its_packs)
        assert {rollouts[rank[at]] // 30 for pack in its_packs[: numbers[0]] for at in pack} == {0}
    assert vpp_size == 1 or not any(number % 2 for number in numbers)


def test_slime_is_told_what_cannot_be_split(planner: Planner) -> None:
    def split(arguments: SlimeArguments, count: int, **more: Any) -> Any:
        given = {"global_batch_size": 8, "rollout_indices": list(range(count)), **more}
        return build_dp_schedule(planner, arguments, parallel(), [100] * count, **given)

    with raises("UsageError: 5 rollouts make no step of 8; lower global_batch_size"):
        split(SlimeArguments(), 5)
    with raises("UsageError: step 0 has 3 samples, too few for equally many micro-batches on 4 ranks"):
        split(SlimeArguments(), 3, global_batch_size=3)
    with raises("UsageError: micro-batches of a fixed size leave nothing to plan; add --use-dynamic-batch-size"):
        split(SlimeArguments(use_dynamic_batch_size=False), 8)
