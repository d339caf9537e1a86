from __future__ import annotations

import os
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.runs.folder import next_run_dir
from fcp_cli.runs.launch_record import latest_run_dir, read_launch, write_launch
from tests.messages import raises
from tests.runs.records import launch_record


def make_run(runs: Path, name: str, *, at: int, training: dict[str, int] | None) -> Path:
    run_dir = runs / name
    run_dir.mkdir(parents=True)
    write_launch(run_dir, launch_record(training=training))
    os.utime(run_dir / "launch.json", (at, at))
    return run_dir


def test_a_new_run_takes_the_number_after_the_largest(tmp_path: Path) -> None:
    assert next_run_dir("tiny", runs=tmp_path) == tmp_path / "tiny-001"
    for name in ("tiny-001", "tiny-009", "tiny-2-017", "tiny-notes", "other-030"):
        (tmp_path / name).mkdir()
    assert next_run_dir("tiny", runs=tmp_path) == tmp_path / "tiny-010"


def test_the_run_to_resume_is_the_one_launched_last(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny-001", at=300, training={})
    make_run(tmp_path, "tiny-002", at=100, training={})
    make_run(tmp_path, "big-001", at=400, training={"steps": 3})
    make_run(tmp_path, "script-001", at=500, training=None)  # a script resumes by its own means
    (tmp_path / "tiny-003").mkdir()
    assert latest_run_dir(None, runs=tmp_path) == tmp_path / "big-001"
    assert latest_run_dir("tiny", runs=tmp_path) == tmp_path / "tiny-001"


def test_no_run_to_resume_is_one_line(tmp_path: Path) -> None:
    with raises(snapshot("RunError: there is no run of tiny in the folder FOLDER to resume; name one with --run-dir")):
        latest_run_dir("tiny", runs=tmp_path)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with raises(snapshot("RunError: FOLDER is not a run that can be resumed: it has no readable launch.json")):
        read_launch(tmp_path)
    (tmp_path / "launch.json").write_text('{"format": "other/1"}')
    with pytest.raises(RunError, match="is not a launch record of format 'fcp-launch/1'"):
        read_launch(tmp_path)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = launch_record(training={"steps": 3}, environment={"FCP_PLAN": "p"}, manifest="lengths.parquet")
    write_launch(tmp_path, record)
    assert read_launch(tmp_path) == record


def test_a_damaged_record_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(launch_record().text().replace('"num_ranks": 4', '"num_ranks": "four"'))
    with raises(snapshot("RunError: FOLDER/launch.json: num_ranks is 'four'; it must be a whole number of at least 1")):
        read_launch(tmp_path)
