"""The plan of a job that was launched without one, from the facts of its training loop."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader, steps_bytes
from fcp_cli.plan.metadata import JobFacts, PlanMetadata, PlanningWish
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning import job_plan, journal, settings
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.job_plan import JobPlanner, own_seconds, packed_step
from fcp_cli.planning.make_plan import make_plan, plan_step
from fcp_cli.planning.problem import Batch, Problem, Solver, problem_of
from fcp_cli.util.console import Assumptions
from fcp_cli.util.masks import segments

_CONFIG = {
    "model_type": "qwen3",
    "_name_or_path": "mine",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
JOB = JobFacts(
    loop="SFTTrainer",
    device="cpu",
    ranks=2,
    ranks_per_node=2,
    rows_per_pass=2,
    global_batch_size=8,
    epochs=2,
    steps=None,
    seed=3,
    shuffle=True,
    last_batch="keep",
    sync="iteration",
    recipe={"zero": "0", "precision": "fp32", "recompute": "none"},
    config=_CONFIG,
)
LENGTHS = pa.table({"length": np.array([5, 900, 17, 60] * 5, dtype=np.int64)})
_PATCHES = [0, 1024, 0, 64] * 5
PICTURES = LENGTHS.append_column("vision_patches", pa.array(_PATCHES)).append_column(
    "vision_patch_pairs", pa.array([patches**2 for patches in _PATCHES])
)


def plan_job(plan: Path, job: JobFacts, wish: PlanningWish, rows: pa.Table) -> PlanMetadata:
    planner = JobPlanner(plan, job, wish, rows)
    planner.plan(0, len(rows))
    planner.close(len(rows))
    return PlanReader(plan).metadata


def test_a_job_is_planned_from_its_facts_and_told_what_that_gains_over_its_padded_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = plan_job(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)

    assert (metadata.steps, metadata.num_ranks, metadata.seed, metadata.epochs) == (6, 2, 3, 2)
    assert metadata.recipe is not None and metadata.recipe.precision == "fp32"
    assert (tmp_path / "profile.yaml").read_text() == metadata.cost_profile
    found, decided = capsys.readouterr().err.splitlines()
    assert found == (
        "fcp: no plan was given: SFTTrainer trains 20 rows of 246 tokens on average (longest 900), 8 a step on 2 ranks; "
        "6 steps are planned while it trains"
    )
    assert "% less than the script's own padded batches (" in decided
    kept = (tmp_path / "gain.txt").read_text()  # for the last line, beside measured seconds
    assert kept.endswith("% less than the script's own padded batches") and kept in decided
    assert "times of mine on this-machine (computed; the first minute of training is measured)" in decided


def test_the_scripts_own_batches_are_priced_as_padded_to_their_longest(tmp_path: Path) -> None:
    metadata = plan_job(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    table = read_manifest(tmp_path / "plan.lengths.parquet")
    problem = problem_of(metadata, name="the plan")
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=4, shuffle=False))
    both = causal_work(np.array([900, 900, 60, 60]), problem.profile.coefficients).packed(np.array([0, 2]))

    found = own_seconds(batches, replace(JOB, global_batch_size=4), [0])

    assert found == pytest.approx(float(group_seconds(problem.profile, both, degree=1, crosses_nodes=False)[0]))


def priced_habit(tmp_path: Path, rows: list[int], **facts: object) -> tuple[float, CostProfile]:
    """Seconds of the only step of a script on these rows of `LENGTHS`, and the profile."""
    metadata = plan_job(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    table = read_manifest(tmp_path / "plan.lengths.parquet").take(np.array(rows))
    problem = problem_of(metadata, name="the plan")
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(rows), shuffle=False))
    job = replace(JOB, global_batch_size=len(rows), **facts)  # type: ignore[arg-type]  # as given
    return own_seconds(batches, job, [0]), problem.profile


def test_rows_that_the_scripts_collator_joins_are_priced_by_what_its_attention_computes(tmp_path: Path) -> None:
    rows = [1, 3, 1, 3]  # 900 and 60 tokens on each rank
    varlen, profile = priced_habit(tmp_path, rows, concatenates=True)
    squares, _ = priced_habit(tmp_path, rows, concatenates=True, masks_all_pairs=True)
    padded, _ = priced_habit(tmp_path, rows)

    own = causal_work(np.array([900, 60]), profile.coefficients).packed(np.array([0]))
    whole = causal_work(np.array([960]), profile.coefficients)
    both = replace(own, attention_seconds=whole.attention_seconds)
    assert varlen == pytest.approx(float(group_seconds(profile, own, degree=1, crosses_nodes=False)[0]))
    assert squares == pytest.approx(float(group_seconds(profile, both, degree=1, crosses_nodes=False)[0]))
    assert varlen < squares and varlen < padded


def test_rows_that_the_script_groups_by_length_are_priced_in_that_order(tmp_path: Path) -> None:
    rows = [0, 1, 2, 3] * 5
    random, _ = priced_habit(tmp_path, rows)
    grouped, _ = priced_habit(tmp_path, rows, groups_by_length=True)
    assert grouped < 0.75 * random


def test_the_scripts_own_packing_is_priced_for_as_many_sequences_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(JOB, global_batch_size=4, packs_to=1000)
    metadata = plan_job(tmp_path / "plan.parquet", job, PlanningWish(), LENGTHS)
    assert re.search(
        r"% (less|more) than the script's own packing \(.* for as many sequences\)",
        capsys.readouterr().err,
    )
    profile = problem_of(metadata, name="the plan").profile

    def seconds(lengths: list[int]) -> float:
        work = causal_work(np.array(lengths), profile.coefficients).packed(np.array([0]))
        return float(group_seconds(profile, work, degree=1, crosses_nodes=False)[0])

    table = read_manifest(tmp_path / "plan.lengths.parquet")
    equal = table.take(np.array([1, 1, 1, 1]))
    batches = GlobalBatches(equal, problem_of(metadata, name="the plan"), BatchSettings(global_batch_size=4))
    assert packed_step(batches, job) == pytest.approx((seconds([900, 900]), 4))
    shorter = table.take(np.array([3] * 32))  # 16 rows of two of 60 tokens, four a step, two a pass
    batches = GlobalBatches(shorter, batches.problem, BatchSettings(global_batch_size=4))
    assert packed_step(batches, replace(job, packs_to=130)) == pytest.approx((seconds([60] * 4), 8))
    assert packed_step(batches, replace(job, packs_to=0)) == pytest.approx((seconds([60] * 2), 4))


def test_a_model_that_fcp_cannot_describe_is_refused_with_the_flags_that_help(tmp_path: Path) -> None:
    job = replace(JOB, config={"model_type": "mamba"})

    with pytest.raises(ProfileError, match=r"model_type is 'mamba'; .*; add --model NAME of a model of this size"):
        plan_job(tmp_path / "plan.parquet", job, PlanningWish(), LENGTHS)
    assert not (tmp_path / "plan.parquet").exists()

    plan_job(tmp_path / "plan.parquet", job, PlanningWish(model="qwen3-tiny"), LENGTHS)
    assert "qwen3-tiny" in (tmp_path / "profile.yaml").read_text()


@pytest.mark.lengthy
def test_pictures_are_planned_with_their_encoders_work_and_never_as_text_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.parquet"
    text = plan_job(tmp_path / "text.parquet", JOB, PlanningWish(model="qwen3-vl-tiny"), LENGTHS)
    capsys.readouterr()

    pictures = plan_job(plan, JOB, PlanningWish(model="qwen3-vl-tiny"), PICTURES)

    assert "(longest 900, 10 rows with pictures), 8 a step" in capsys.readouterr().err
    assert read_manifest(tmp_path / "plan.lengths.parquet").vision_patches is not None
    assert pictures.cost_profile == text.cost_profile
    seconds = [
        sum(step.makespan_seconds for step in PlanReader(one).steps()) for one in (plan, tmp_path / "text.parquet")
    ]
    assert seconds[0] > 1.01 * seconds[1]
    with pytest.raises(ProfileError, match=r"10 rows .* have pictures, but .* qwen3-tiny has no vision encoder"):
        plan_job(tmp_path / "other.parquet", JOB, PlanningWish(model="qwen3-tiny"), PICTURES)


def test_masks_of_token_types_are_kept_in_the_plan(tmp_path: Path) -> None:
    masks = pa.array([[], [4, 200]] * 10, pa.list_(pa.int32()))
    rows = LENGTHS.append_column("eta", pa.array([0.0, 0.01] * 10)).append_column("mask", masks)
    metadata = plan_job(tmp_path / "plan.parquet", JOB, PlanningWish(), rows)
    assert metadata.masked_sequences == 10 and metadata.masks is not None
    assert metadata.masks.of_rows(20).mask(1) == segments([(4, 200)])


def test_steps_are_planned_as_they_are_asked_for_and_the_whole_plan_is_that_of_fcp_plan(tmp_path: Path) -> None:
    planner = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    asked = [*planner.plan(0, 2), *planner.plan(2, 1)]
    assert [step.step for step in asked] == [0, 1, 2]
    assert not (tmp_path / "plan.parquet").exists()
    planner.close(3)  # which plans the others

    profile = str(tmp_path / "profile.yaml")
    (tmp_path / "again").mkdir()
    inputs = settings.resolve(
        replace(
            job_plan._request(tmp_path / "plan.lengths.parquet", tmp_path / "plan.parquet", JOB, PlanningWish()),
            profile=Path(profile),
            model=None,
            cluster=None,
        ),
        Assumptions(),
    )
    whole = make_plan(tmp_path / "again/plan.parquet", inputs)

    steps = list(PlanReader(tmp_path / "plan.parquet").steps())
    assert steps_bytes(steps) == steps_bytes(list(PlanReader(tmp_path / "again/plan.parquet").steps()))
    assert steps_bytes(steps[:3]) == steps_bytes(asked)
    assert len(steps) == whole.metadata.steps == 6


def test_a_job_that_was_killed_continues_from_the_steps_that_its_journal_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_ROWS_PER_WINDOW", 1)
    killed = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    first = killed.plan(0, 4)
    planned: list[int] = []

    def count_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
        planned.append(batch.step)
        return plan_step(batch, problem, solver)

    monkeypatch.setattr(job_plan, "plan_step", count_step)

    again = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    later = again.plan(2, 10)
    again.close(6)

    assert steps_bytes(later[:2]) == steps_bytes(first[2:])
    assert planned == [4, 5]
    assert PlanReader(tmp_path / "plan.parquet").metadata.steps == 6
    assert not (tmp_path / ".plan.parquet.journal").exists()


def test_a_loop_that_ends_long_before_its_plan_leaves_the_steps_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_plan, "_PATIENCE_SECONDS", 0.0)
    planner = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    planner.plan(0, 2)

    assert planner.close(2) is None
    assert not (tmp_path / "plan.parquet").exists()
    assert "fcp: 2 steps of 6 are planned: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.lengthy
def test_a_loop_whose_epochs_nobody_knows_is_planned_for_those_that_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = JobPlanner(tmp_path / "plan.parquet", replace(JOB, epochs=None), PlanningWish(), LENGTHS)
    trained = endless.plan(0, 8)  # ahead of a loop that leaves in its second epoch of three steps
    endless.close(4)

    found, decided = capsys.readouterr().err.splitlines()
    assert found.endswith("3 steps an epoch, for as many epochs as the loop has, are planned while it trains")
    assert "a step predicted for the first 3," in decided
    reader = PlanReader(tmp_path / "plan.parquet")
    assert (reader.metadata.epochs, reader.metadata.steps) == (2, 6)
    assert steps_bytes(list(reader.steps())) == steps_bytes(trained[:6])
    (tmp_path / "known").mkdir()
    plan_job(tmp_path / "known" / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    known = list(PlanReader(tmp_path / "known" / "plan.parquet").steps())
    assert steps_bytes(known) == steps_bytes(trained[:6])


def timings(planner: JobPlanner, steps: range, factor: float) -> pa.Table:
    """Measured micro-batches of planned steps, all of them `factor` times as long as predicted."""
    planned = [step for step in planner.plan(0, steps.stop) if step.step in steps]
    rows = [
        (step.step, one.order, rank, one.seconds * factor)
        for step in planned
        for one in step.microbatches()
        for rank in one.ranks
    ]
    return pa.table(dict(zip(("step", "order", "rank", "seconds"), zip(*rows, strict=True), strict=True)))


@pytest.mark.lengthy
def test_a_job_measures_its_first_steps_and_plans_the_others_by_these_times(tmp_path: Path) -> None:
    job = replace(JOB, epochs=4)
    first = JobPlanner(tmp_path / "first.parquet", job, PlanningWish(), LENGTHS)
    assert first.opened()["wants_measurements"]

    line = first.refit(timings(first, range(1, 8), 3.0))
    first.close(12)

    assert line.startswith("step 8: ")
    metadata = PlanReader(tmp_path / "first.parquet").metadata
    assert metadata.refits is not None and metadata.refits[0].first_step == 8
    table = read_manifest(tmp_path / "first.lengths.parquet")
    assert list(check_plan(tmp_path / "first.parquet", manifest=table)) == []
    computed = JobPlanner(tmp_path / "computed.parquet", job, PlanningWish(), LENGTHS).plan(0, 12)
    fitted = list(PlanReader(tmp_path / "first.parquet").steps())
    assert steps_bytes(fitted[:8]) == steps_bytes(computed[:8])
    assert [one.makespan_seconds for one in fitted[8:]] == pytest.approx(
        [3.0 * one.makespan_seconds for one in computed[8:]], rel=0.1
    )


@pytest.mark.lengthy
def test_a_killed_job_plans_its_steps_by_the_same_times_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_ROWS_PER_WINDOW", 6)
    job, path = replace(JOB, epochs=4), tmp_path / "plan.parquet"
    killed = JobPlanner(path, job, PlanningWish(), LENGTHS)
    killed.refit(timings(killed, range(1, 8), 3.0))
    steps = killed.plan(0, 12)

    again = JobPlanner(path, job, PlanningWish(), LENGTHS)
    assert not again.opened()["wants_measurements"]
    again.close(12)

    metadata = PlanReader(path).metadata
    assert metadata.refits == killed.metadata.refits
    assert steps_bytes(list(PlanReader(path).steps(8))) == steps_bytes(steps)


def test_given_times_stay(tmp_path: Path) -> None:
    JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS).close(6)
    given = JobPlanner(tmp_path / "given.parquet", JOB, PlanningWish(profile=str(tmp_path / "profile.yaml")), LENGTHS)
    assert not given.opened()["wants_measurements"]


def test_a_loop_that_somebody_stops_leaves_at_once_what_is_not_planned_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_plan, "_STOPPED_SECONDS", 0.0)
    planner = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    planner.plan(0, 2)

    assert planner.close(2, is_stopped=True) is None
    assert "fcp: 2 steps of 6 are planned: " in capsys.readouterr().err.splitlines()[-1]

    again = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    assert again.close(6) is not None


@pytest.mark.parametrize(
    ("loop", "setting"),
    [
        ("SFTTrainer", "gradient_checkpointing=False"),
        ("LitModel", "its activation checkpointing off"),  # a module of Lightning
        ("a loop around DeepSpeed's engine", "its activation checkpointing off"),
    ],
)
def test_a_quicker_recipe_is_named_by_the_scripts_own_setting(
    loop: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = SimpleNamespace(factor=0.88, flags="--recompute none")
    monkeypatch.setattr(job_plan, "best_remedy", lambda inputs, sample: (remedy, ()))
    inputs: Any = SimpleNamespace(data=None)
    advice = f"the script's steps would take 12% less with {setting}"
    assert job_plan._gain_of_another_recipe(inputs, loop) == advice
