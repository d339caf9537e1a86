from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_plan, check_step
from fcp_cli.plan.file import PlanReader, plan_writer
from fcp_cli.plan.pricing import EncoderShares, beside_language
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.compare import colocated, encoder_placements
from fcp_cli.planning.encoder_balance import balanced_encoder, with_encoder_ranks
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem, problem_of
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.util.console import Assumptions
from tests.planning.examples import example_problem, long_tail

SETTINGS = BatchSettings(global_batch_size=64, step_limit=2)


def with_pictures() -> LengthTable:
    """Every third sequence is made of patches."""
    text = long_tail()
    patches = np.where(np.arange(len(text)) % 3 == 0, 3 * text.length_tokens, 0)
    return replace(text, vision_patches=patches)


def seeing() -> CostProfile:
    profile = example_problem().profile
    seen = replace(profile, coefficients=replace(profile.coefficients, vision_seconds_per_patch=1e-4))
    return replace(seen, text=dump_cost_profile(seen))


def problem_over(balance: str | None) -> Problem:
    return replace(example_problem("microbatch"), profile=seeing(), encoder_balance=balance)  # type: ignore[arg-type]


def test_over_the_wave_each_micro_batch_waits_for_an_even_share_of_its_waves_pictures(tmp_path: Path) -> None:
    table, plan = with_pictures(), tmp_path / "plan.parquet"
    inputs = PlanInputs(table=table, problem=problem_over("wave"), settings=SETTINGS)
    make_plan(plan, inputs)
    reader = PlanReader(plan)
    assert reader.metadata.encoder_balance == "wave"
    assert list(check_plan(plan, manifest=table)) == []
    step = next(iter(reader.steps()))
    make_plan(tmp_path / "text", replace(inputs, table=long_tail()))
    text = next(iter(PlanReader(tmp_path / "text").steps()))
    assert np.array_equal(step.sequences, text.sequences)  # packs are those of the language model alone
    assert table.vision_patches is not None
    encoder_seconds = 1e-4 * table.vision_patches[step.sequences].sum() / 16
    assert step.makespan_seconds == pytest.approx(text.makespan_seconds + encoder_seconds)
    assert step.bound_seconds == pytest.approx(text.bound_seconds + encoder_seconds)


def test_ranks_that_only_encode_hold_no_sequences(tmp_path: Path) -> None:
    table, plan = with_pictures(), tmp_path / "plan.parquet"
    batches = GlobalBatches(table, problem_over(None), replace(SETTINGS, global_batch_size=200))
    problem = with_encoder_ranks(batches, "4", Assumptions())
    assert (problem.num_ranks, problem.encoder_ranks, problem.all_ranks) == (12, 4, 16)
    request = PlanRequest(solver="static")
    make_plan(plan, PlanInputs(table=table, problem=problem, settings=batches.settings, request=request))
    metadata = PlanReader(plan).metadata
    assert (metadata.num_ranks, metadata.encoder_ranks) == (16, 4)
    assert problem_of(metadata, name="plan") == problem
    assert list(check_plan(plan, manifest=table)) == []
    step = next(iter(PlanReader(plan).steps()))
    assert len(np.unique(step.wave)) > 1
    assert all(row.is_idle for row in step.microbatches() if row.ranks[0] >= 12)
    found = [str(one) for one in check_step(step, replace(metadata, encoder_ranks=5), problem.profile, None)]
    assert any(message.endswith("rank 11 only encodes, but has sequences") for message in found), found


@pytest.mark.parametrize("forward_share", [1.0, 1 / 3])
def test_others_wait_for_ranks_that_encode_as_two_machines_that_meet(forward_share: float) -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        waves = int(draw.integers(1, 6))
        encoder = 3 * draw.integers(0, 30, waves).astype(np.float64)
        language = draw.integers(1, 60, waves).astype(np.float64)
        shares = EncoderShares(1, runs_ahead=True, forward_share=forward_share)
        found = beside_language(shares, encoder, language, np.arange(waves, dtype=np.int32)) + language
        assert found.sum() == pytest.approx(two_machines(encoder.tolist(), language.tolist(), forward_share))


def two_machines(encoder: list[float], language: list[float], forward_share: float) -> float:
    """When both have run their lists: seconds to compute, and names at which they meet."""
    forward, backward = forward_share, 1 - forward_share
    waves = range(len(encoder))
    encodes: list[float | str] = [forward * encoder[0]]
    for w in waves:
        encodes += [f"embeddings {w}", *(forward * encoder[w + 1] for _ in waves[w + 1 : w + 2])]
        encodes += [*(backward * encoder[w - 1] for _ in waves[:w][-1:]), f"gradients {w}"]
    encodes.append(backward * encoder[-1])
    speaks: list[float | str] = [one for w in waves for one in (f"embeddings {w}", language[w], f"gradients {w}")]
    clocks = [0.0, 0.0]
    lists = [list(reversed(encodes)), list(reversed(speaks))]
    while any(lists):
        for machine, todo in enumerate(lists):
            while todo and not isinstance(todo[-1], str):
                clocks[machine] += float(todo.pop())
        if lists[0] and lists[1]:
            assert lists[0].pop() == lists[1].pop()
            clocks = [max(clocks)] * 2
    return max(clocks)


def test_encoder_ranks_are_refused_where_they_cannot_run_ahead_and_auto_counts_them() -> None:
    batches = GlobalBatches(with_pictures(), problem_over(None), SETTINGS)
    for wanted in ("0", "16", "-1", "few"):
        with pytest.raises(UsageError, match="it must be auto, or 1 to 15 of 16 ranks"):
            with_encoder_ranks(batches, wanted, Assumptions())
    iteration = GlobalBatches(with_pictures(), replace(problem_over(None), sync="iteration"), SETTINGS)
    with pytest.raises(UsageError, match=r"sends embeddings wave by wave; add --sync microbatch, or remove it"):
        with_encoder_ranks(iteration, "2", Assumptions())
    sharded = GlobalBatches(with_pictures(), replace(problem_over(None), recipe=Recipe(zero_stage=3)), SETTINGS)
    with pytest.raises(UsageError, match=r"FSDP2 \(--zero 3\) keeps in step; add --zero 1, or remove it"):
        with_encoder_ranks(sharded, "2", Assumptions())
    assumptions = Assumptions()
    problem = with_encoder_ranks(batches, "auto", assumptions)
    assert problem.encoder_ranks is not None and 1 <= problem.encoder_ranks < 12
    assert assumptions.assumed["--encoder-ranks"].startswith(f"{problem.encoder_ranks} (the first step takes ")


def test_placements_of_the_encoder_are_compared() -> None:
    batches = GlobalBatches(with_pictures(), problem_over(None), replace(SETTINGS, step_limit=1))
    problem = with_encoder_ranks(batches, "3", Assumptions())
    inputs = PlanInputs(table=batches.table, problem=problem, settings=batches.settings)
    found = list(encoder_placements(inputs, [0]))
    assert [one.name for one in found] == ["fcp over the wave", "fcp, 3 encode"]
    assert all(list(one.outcomes) == ["microbatch"] for one in found)
    assert list(encoder_placements(replace(inputs, problem=problem_over(None)), [0])) == []
    assert colocated(problem) == problem_over(None)


def test_a_plan_over_waves_without_waves_is_found(tmp_path: Path) -> None:
    plan = tmp_path / "plan.parquet"
    inputs = PlanInputs(table=with_pictures(), problem=problem_over("wave"), settings=SETTINGS)
    problem = replace(problem_over(None), sync="iteration")
    make_plan(plan, replace(inputs, problem=problem, request=PlanRequest(solver="static")))
    assert list(check_plan(plan)) == []
    metadata = replace(PlanReader(plan).metadata, encoder_balance="wave")
    with plan_writer(tmp_path / "edited", metadata) as writer:
        for step in PlanReader(plan).steps():
            writer.append(step)
    found = next(check_plan(tmp_path / "edited"))
    assert str(found) == "its encoder_balance needs sync microbatch, but sync is iteration"


def test_waves_are_refused_where_there_are_none_and_auto_takes_what_is_sooner() -> None:
    iteration = GlobalBatches(with_pictures(), replace(problem_over(None), sync="iteration"), SETTINGS)
    with pytest.raises(UsageError, match=r"^--encoder-balance wave needs .* add --sync microbatch, or remove it"):
        balanced_encoder(iteration, "wave", Assumptions())
    assert balanced_encoder(iteration, "auto", Assumptions()).encoder_balance is None
    assumptions = Assumptions()
    batches = GlobalBatches(with_pictures(), problem_over(None), SETTINGS)
    chosen = balanced_encoder(batches, "auto", assumptions)
    said = assumptions.assumed["--encoder-balance"]
    assert said.startswith(f"{chosen.encoder_balance or 'ring'} (the first step takes ")
    text = GlobalBatches(long_tail(), problem_over(None), SETTINGS)
    assert balanced_encoder(text, "auto", Assumptions()).encoder_balance is None
