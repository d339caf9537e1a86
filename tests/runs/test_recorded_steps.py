"""A checkpoint is only as new as the metrics beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoints import CheckpointHeader
from fcp_cli.runs.metrics import MetricsWriter
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runs.trained_run import require_recorded
from tests.runs.records import write_steps


def write_checkpoint(run_dir: Path, step: int) -> Path:
    header = CheckpointHeader(
        step=step, plan_hash="0" * 64, num_ranks=4, sharding="replicated", model="qwen3-tiny", torch="2"
    )
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(header.text())
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Metrics of 4 steps, as a killed torchrun left them, and checkpoints that go far beyond."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    for step in (2, 118, 120):
        write_checkpoint(run_dir, step)
    write_steps(run_dir / "metrics.jsonl", 4)
    return run_dir


def test_steps_that_no_metrics_record_are_named_with_both_ways_to_resume(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000120"
    with pytest.raises(RunError) as refused:
        require_recorded(newest, accepts=False)
    assert str(refused.value) == (
        "run/checkpoints/step-00000120 has finished 120 steps, but run/metrics.jsonl records 4: steps 5 to 120 are in no "
        "record; resume with --accept-unrecorded, or remove step-00000118 and step-00000120 to train them again from "
        "step-00000002"
    )
    require_recorded(newest, accepts=True)


def test_metrics_as_new_as_the_checkpoint_or_newer_will_do(run: Path) -> None:
    require_recorded(run / "checkpoints" / "step-00000002", accepts=False)
    write_steps(run / "metrics.jsonl", 120)
    require_recorded(run / "checkpoints" / "step-00000120", accepts=False)


def test_a_run_without_metrics_is_trained_again_from_the_beginning(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"records 0: steps 1 to 120 are in no record; .* again from the beginning"):
        require_recorded(run / "checkpoints" / "step-00000120", accepts=False)


@pytest.mark.hf
def test_rank_0_of_a_job_that_a_scheduler_starts_again_refuses_too(run: Path) -> None:
    from fcp_cli.training.trainer import Trainer

    def trainer(*, accepts: bool) -> Trainer:
        settings = SimpleNamespace(accept_unrecorded=accepts)
        session = SimpleNamespace(rank=0)
        return cast(Trainer, SimpleNamespace(session=session, settings=settings, paths=RunPaths(run_dir=run)))

    with pytest.raises(RunError, match="steps 5 to 120 are in no record"):
        Trainer._newest_checkpoint(trainer(accepts=False))
    assert Trainer._newest_checkpoint(trainer(accepts=True)) == run / "checkpoints" / "step-00000120"


def test_metrics_are_on_the_disk_before_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    monkeypatch.setattr("os.fsync", synced.append)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"kind": "run"})
    writer.sync()
    writer.close()
    assert len(synced) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"kind": "run"}
