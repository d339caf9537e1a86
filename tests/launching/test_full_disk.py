"""The last line of a job whose disk is full is about the disk, which the ranks themselves cannot say."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from fcp_cli.cli import launch
from fcp_cli.errors import RunError
from fcp_cli.launching import supervise
from fcp_cli.launching.failure import Failure
from fcp_cli.launching.supervise import JobOutcome, RunProgress, full_disk_line, is_full
from fcp_cli.runs.owner import own
from tests.launching.jobs import local_job
from tests.launching.test_run import FakeRunner


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervise, "TemporaryFile", refuse)


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").touch()


def test_a_disk_with_space_is_not_full_nor_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert not is_full(tmp_path)
    assert not is_full(tmp_path / "gone")


def test_the_line_names_the_folder_and_the_newest_checkpoint_and_the_command(
    tmp_path: Path, disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_full(tmp_path)
    assert full_disk_line(tmp_path / "run", "") == (
        "the disk of run is full; no checkpoint was saved, the metrics are kept; free some space and start again"
    )
    save(tmp_path / "run", 5)
    assert full_disk_line(tmp_path / "run", "fcp launch --run-dir run --resume") == (
        "the disk of run is full; step-00000005 and the metrics are kept; free some space, then continue with: fcp launch "
        "--run-dir run --resume"
    )


def test_a_job_that_failed_on_a_full_disk_ends_with_that_line(
    tmp_path: Path, disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = local_job(run_dir=tmp_path)
    failure = Failure(rank=None, status=1, message="", last_lines=(), log=tmp_path / "torchrun.log")
    outcome = JobOutcome(status=1, stopped_by=None, failure=failure)
    monkeypatch.setattr(launch, "_run_watched", lambda *_, **__: (outcome, RunProgress(job.paths, None)))
    monkeypatch.setattr("fcp_cli.launching.refusals.check_run_dir", lambda *_: None)
    monkeypatch.setattr("fcp_cli.launching.commands.document_of", lambda *_: {})
    monkeypatch.setattr("fcp_cli.runs.run_dir.write_record", lambda *_: None)
    monkeypatch.setattr("fcp_cli.util.files.write_json_atomically", lambda *_: None)
    with pytest.raises(RunError, match=r"^the disk of .* is full; no checkpoint was saved"), own(tmp_path) as owned:
        launch.run_here(job, owned, json=False)


class Failing(FakeRunner):
    """Local rank 0 leaves a traceback of what it could not write."""

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> FakeRunner:
        super().start(argv, environment, output)
        (self._rank_0 / "stderr.log").write_text("before\nTraceback (most recent call last):\n  half of one")
        return self


@pytest.mark.parametrize("full", [False, True])
def test_the_tracebacks_of_a_full_disk_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    monkeypatch.setattr(supervise, "is_full", lambda folder: full)
    job = local_job(run_dir=tmp_path, log_dir=tmp_path / "logs")
    supervise.run_job(job, start=Failing(status=1, log_dir=tmp_path / "logs").start)
    shown = capsys.readouterr().err
    assert shown.startswith("before\n")
    assert ("Traceback" in shown) == (not full)
