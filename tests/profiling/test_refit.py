from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import Sample, predicted_seconds
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, dump_cost_profile
from fcp_cli.errors import ProfileError, RunError
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.profiling.refit import refit, samples_of_run
from tests.messages import raises

PLANNED = CostProfile(
    model="m",
    cluster="c",
    origin="assumed",
    coefficients=Coefficients(
        attention_seconds_per_token2=1e-8,
        linear_seconds_per_token=1e-5,
        ring_bytes_per_token=3072,
        microbatch_seconds=1e-3,
        ring_hop_seconds=1e-4,
    ),
    bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
)
TRUTH = replace(
    PLANNED,
    coefficients=replace(
        PLANNED.coefficients, attention_seconds_per_token2=3e-8, linear_seconds_per_token=5e-5, microbatch_seconds=4e-3
    ),
)


SEES = replace(
    PLANNED,
    coefficients=replace(PLANNED.coefficients, vision_seconds_per_patch=1e-6, vision_seconds_per_patch2=1e-9),
)


def _patches(index: int) -> tuple[int, int]:
    """Of the images of a step's two packs; pairs of patches are counted in."""
    return 500 * (index % 7), 300 * (index % 4)


def _step(index: int, seconds: tuple[float, float] = (1.0, 1.0)) -> StepPlan:
    """A ring of two ranks, one rank alone, and an idle one."""
    lengths = [[512 + 64 * index], [128, 64 + 32 * index]]
    return StepPlan(
        step=index,
        wave=np.full(3, -1, dtype=np.int32),
        rank_offsets=np.array([0, 2, 3, 4]),
        ranks=np.array([0, 1, 2, 3], dtype=np.int32),
        sequence_offsets=np.array([0, 1, 3, 3]),
        sequences=np.arange(3 * index, 3 * index + 3),
        lengths=np.array(lengths[0] + lengths[1], dtype=np.int32),
        start_seconds=np.zeros(3),
        seconds=np.array([*seconds, 0.0]),
        makespan_seconds=1.0,
        bound_seconds=0.5,
    )


def _seconds(index: int, profile: CostProfile) -> tuple[float, float]:
    """Of a step's two packs under a profile; images count where it knows an encoder."""
    rows = list(_step(index).microbatches())[:2]
    samples = [
        Sample(lengths=row.lengths, degree=row.degree, seconds=1.0, patches=patches)
        for row, patches in zip(rows, _patches(index), strict=True)
    ]
    first, second = predicted_seconds(samples, profile).tolist()
    return first, second


def _rank(rank: int, *, order: int, seconds: float) -> dict[str, Any]:
    timing = {"order": order, "degree": 1, "tokens": 1, "predicted_seconds": 1.0, "start_seconds": 0.0}
    return {"rank": rank, "idle_seconds": 0.0, "micro_batches": [{**timing, "seconds": seconds}]}


def write_run(
    folder: Path, steps: int = 20, *, planned: CostProfile = PLANNED, truth: CostProfile = TRUTH, model: str = "m"
) -> tuple[Path, Path]:
    """A plan and the metrics of a run in which a rank of each ring waited for the other."""
    plan, metrics = folder / "plan.parquet", folder / "metrics.jsonl"
    metadata = PlanMetadata(
        fcp_version="0",
        num_ranks=4,
        ranks_per_node=2,
        sync="iteration",
        global_batch_size=3,
        tokens_per_rank=4096,
        seed=0,
        shuffle=False,
        solver="test",
        manifest=ManifestReference(name="m", rows=3 * steps, content_hash="0"),
        cost_profile=dump_cost_profile(planned),
    )
    with plan_writer(plan, metadata) as writer:
        for index in range(steps):
            writer.append(_step(index, _seconds(index, planned)))
    run: dict[str, Any] = {
        "format": "fcp-metrics/1",
        "kind": "run",
        "plan": str(plan),
        "plan_hash": writer.metadata.plan_hash,
    }
    run |= {"model": model, "num_ranks": 4, "ranks_per_node": 2}
    rows: list[dict[str, Any]] = [run]
    for index in range(steps):
        seconds = _seconds(index, truth)
        slow = 10.0 if index == 0 else 1.0  # the first step warms up
        rows.append(
            {
                "kind": "step",
                "step": index,
                "loss": 1.0,
                "tokens": 1,
                "seconds": 1.0,
                "predicted_seconds": 1.0,
                "idle_fraction": 0.0,
                "ranks": [
                    _rank(0, order=0, seconds=slow * seconds[0] + 0.5),
                    _rank(1, order=0, seconds=slow * seconds[0]),
                    _rank(2, order=1, seconds=slow * seconds[1]),
                    _rank(3, order=2, seconds=0.0001),
                ],
            }
        )
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return metrics, plan


def test_a_refit_finds_what_the_run_really_took(tmp_path: Path) -> None:
    metrics, _ = write_run(tmp_path)
    result = refit([samples_of_run(metrics, plan=None, skip_steps=1)])
    assert result.num_fitted + result.num_held_out == 2 * 19
    assert result.held_out_before_percent > 40
    assert result.held_out_after_percent < 1
    assert result.profile.origin == "fitted"
    assert result.profile.measurement["runs"][0]["micro_batches"] == 38


def test_the_encoders_part_is_fitted_and_not_taken_for_the_language_models(tmp_path: Path) -> None:
    """The run's encoder is ten times as slow as the plan believed."""
    truth = replace(
        TRUTH,
        coefficients=replace(TRUTH.coefficients, vision_seconds_per_patch=1e-5, vision_seconds_per_patch2=1e-8),
    )
    metrics, _ = write_run(tmp_path, planned=SEES, truth=truth, model="qwen3-vl-tiny")
    run = samples_of_run(metrics, plan=None, skip_steps=1)
    result = refit([run])
    found = result.profile.coefficients
    for name in (
        "attention_seconds_per_token2",
        "linear_seconds_per_token",
        "microbatch_seconds",
        "vision_seconds_per_patch",
        "vision_seconds_per_patch2",
    ):
        assert getattr(found, name) == pytest.approx(getattr(truth.coefficients, name), rel=0.02), name
    assert result.held_out_after_percent < 1
    assert "the ratio of coefficients.vision_seconds_per_patch2 to vision_seconds_per_patch" in result.kept
    assert not run.hides_encoder


@pytest.mark.parametrize(("model", "hides"), [("qwen3-vl-tiny", True), ("qwen3-tiny", False), ("of a script", False)])
def test_an_encoder_that_the_plan_knew_nothing_of_is_told(tmp_path: Path, model: str, hides: bool) -> None:
    metrics, _ = write_run(tmp_path, model=model)
    assert samples_of_run(metrics, plan=None, skip_steps=1).hides_encoder is hides


def test_idle_rows_and_warm_up_steps_are_no_samples(tmp_path: Path) -> None:
    metrics, _ = write_run(tmp_path)
    run = samples_of_run(metrics, plan=None, skip_steps=1)
    assert len(run.samples) == 38
    assert {sample.degree for sample in run.samples} == {1, 2}
    assert max(sample.seconds for sample in run.samples) < 0.5  # the shortest of a ring's ranks counts


def test_another_plan_than_the_runs_is_rejected(tmp_path: Path) -> None:
    metrics, _ = write_run(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, plan = write_run(other, steps=3)
    with pytest.raises(ProfileError, match=r"other/plan.parquet is not the plan of .*--plan"):
        samples_of_run(metrics, plan=plan, skip_steps=1)


def test_a_run_too_short_to_warm_up_says_so(tmp_path: Path) -> None:
    metrics, _ = write_run(tmp_path, steps=1)
    with raises(
        snapshot("ProfileError: FOLDER/metrics.jsonl has no steps beyond the first 1 of each start; lower --skip-steps")
    ):
        samples_of_run(metrics, plan=None, skip_steps=1)


def test_a_file_that_is_no_metrics_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RunError, match=r"is not the metrics of a run"):
        samples_of_run(path, plan=None, skip_steps=0)
