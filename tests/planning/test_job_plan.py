"""The plan of a job that was launched without one, from the facts of its training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.arrays import IntArray
from fcp_cli.console import Origins
from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.errors import ProfileError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.job_facts import JobFacts, PlanningWish
from fcp_cli.plan.messages import steps_bytes
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.reader import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning import job_plan, journal, settings
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.job_plan import JobPlanner, padded_seconds
from fcp_cli.planning.parallel import plan_step
from fcp_cli.planning.problem import Batch, Problem, Solver, problem_of
from fcp_cli.planning.run import make_plan

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
LENGTHS = np.array([5, 900, 17, 60] * 5, dtype=np.int64)


def plan_job(plan: Path, job: JobFacts, wish: PlanningWish, lengths: IntArray) -> PlanMetadata:
    planner = JobPlanner(plan, job, wish, lengths)
    planner.plan(0, len(lengths))
    planner.close()
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
    assert "times of mine on this-machine (computed, not measured: 'fcp profile' measures)" in decided


def test_the_scripts_own_batches_are_priced_as_padded_to_their_longest(tmp_path: Path) -> None:
    metadata = plan_job(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    table = read_manifest(tmp_path / "plan.lengths.parquet")
    problem = problem_of(metadata, name="the plan")
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=4, shuffle=False))
    both = causal_work(np.array([900, 900, 60, 60]), problem.profile.coefficients).packed(np.array([0, 2]))

    found = padded_seconds(batches, replace(JOB, global_batch_size=4), [0])

    assert found == pytest.approx(float(group_seconds(problem.profile, both, degree=1, crosses_nodes=False)[0]))


def test_a_model_that_fcp_cannot_describe_is_refused_with_the_flags_that_help(tmp_path: Path) -> None:
    job = replace(JOB, config={"model_type": "mamba"})

    with pytest.raises(ProfileError, match=r"model_type is 'mamba'; .*; add --model NAME of a model of this size"):
        plan_job(tmp_path / "plan.parquet", job, PlanningWish(), LENGTHS)
    assert not (tmp_path / "plan.parquet").exists()

    plan_job(tmp_path / "plan.parquet", job, PlanningWish(model="qwen3-tiny"), LENGTHS)
    assert "qwen3-tiny" in (tmp_path / "profile.yaml").read_text()


def test_steps_are_planned_as_they_are_asked_for_and_the_whole_plan_is_that_of_fcp_plan(tmp_path: Path) -> None:
    planner = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    asked = [*planner.plan(0, 2), *planner.plan(2, 1)]
    assert [step.step for step in asked] == [0, 1, 2]
    assert not (tmp_path / "plan.parquet").exists()
    planner.close()  # which plans the others

    profile = str(tmp_path / "profile.yaml")
    (tmp_path / "again").mkdir()
    inputs = settings.resolve(
        replace(
            job_plan._request(tmp_path / "plan.lengths.parquet", tmp_path / "plan.parquet", JOB, PlanningWish()),
            profile=Path(profile),
            model=None,
            cluster=None,
        ),
        Origins(),
    )
    whole = make_plan(tmp_path / "again/plan.parquet", inputs, solver_name="fcp")

    steps = list(PlanReader(tmp_path / "plan.parquet").steps())
    assert steps_bytes(steps) == steps_bytes(list(PlanReader(tmp_path / "again/plan.parquet").steps()))
    assert steps_bytes(steps[:3]) == steps_bytes(asked)
    assert len(steps) == whole.metadata.steps == 6


def test_a_job_that_was_killed_continues_from_the_steps_that_its_journal_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_ROWS_PER_PART", 1)
    killed = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    first = killed.plan(0, 4)
    planned: list[int] = []

    def count_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
        planned.append(batch.step)
        return plan_step(batch, problem, solver)

    monkeypatch.setattr(job_plan, "plan_step", count_step)

    again = JobPlanner(tmp_path / "plan.parquet", JOB, PlanningWish(), LENGTHS)
    later = again.plan(2, 10)
    again.close()

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

    assert planner.close() is None
    assert not (tmp_path / "plan.parquet").exists()
    assert "fcp: 2 steps of 6 are planned: " in capsys.readouterr().err.splitlines()[-1]
