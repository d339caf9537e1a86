from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import read_online_settings
from fcp_cli.runs.checkpoints import CheckpointHeader, checkpoints, read_header
from fcp_cli.runs.metrics_reader import summary_of
from fcp_cli.runs.owner import read_owner
from fcp_cli.runs.run_dir import latest_run_dir, next_run_dir, read_launch
from tests.messages import raises
from tests.runs.records import write_launch


def make_run(runs: Path, name: str, *, at: int, training: dict[str, int] | None) -> Path:
    run_dir = runs / name
    run_dir.mkdir(parents=True)
    write_launch(run_dir, training=training)
    os.utime(run_dir / "launch.json", (at, at))
    return run_dir


def test_a_new_run_takes_the_number_after_the_largest(tmp_path: Path) -> None:
    assert next_run_dir("tiny", runs=tmp_path) == tmp_path / "tiny-001"
    for name in ("tiny-001", "tiny-009", "tiny-2-017", "tiny-notes", "other-030", "tiny-²", "tiny-٣", f"tiny-{9**99}"):
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


def test_a_damaged_record_hides_only_the_runs_before_it(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny-001", at=100, training={})
    bad = make_run(tmp_path, "tiny-002", at=50, training={})
    (bad / "launch.json").write_text("{")
    os.utime(bad / "launch.json", (50, 50))
    assert latest_run_dir(None, runs=tmp_path) == tmp_path / "tiny-001"
    os.utime(bad / "launch.json", (200, 200))
    with raises(
        snapshot(
            "RunError: FOLDER/tiny-002/launch.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); name the run to resume with --run-dir"
        )
    ):
        latest_run_dir(None, runs=tmp_path)


def test_only_numbered_folders_are_checkpoints(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-²", "step-x", "step-00000010", "step-00000010.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").touch()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_a_checkpoint_with_a_damaged_header_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000003"
    checkpoint.mkdir()
    header = CheckpointHeader(step=-1, plan_hash="", num_ranks=4, sharding="replicated", model="tiny", torch="2")
    (checkpoint / "checkpoint.json").write_text(header.text())
    with raises(
        snapshot(
            "RunError: FOLDER/step-00000003/checkpoint.json is damaged: step is -1; it must be a whole number of at least 0; no checkpoint before it is left: restore step-00000003 from a copy, or start a new run without --resume"
        )
    ):
        read_header(checkpoint)


@pytest.mark.parametrize("name", ["launch.json", "metrics.jsonl", "owner.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_in_a_run_folder_are_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    readers: dict[str, Callable[[Path], object]] = {
        "launch.json": lambda path: read_launch(path.parent),
        "metrics.jsonl": summary_of,
        "owner.json": read_owner,
    }
    reason = "it is a pipe" if kind == "pipe" else "it is not a regular file"
    with pytest.raises(RunError, match=f"{name}: {reason}"):
        readers[name](tmp_path / name)


def test_no_run_to_resume_is_one_line(tmp_path: Path) -> None:
    with raises(snapshot("RunError: there is no run of tiny in the folder FOLDER to resume; name one with --run-dir")):
        latest_run_dir("tiny", runs=tmp_path)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with raises(
        snapshot(
            "RunError: FOLDER is not a run: it has no launch.json; name the folder of one, such as runs/qwen3-tiny-001"
        )
    ):
        read_launch(tmp_path)
    with raises(
        snapshot("RunError: there is no run at FOLDER/nowhere; name the folder of one, such as runs/qwen3-tiny-001")
    ):
        read_launch(tmp_path / "nowhere")
    (tmp_path / "launch.json").write_text('{"format": "other/1"}')
    with pytest.raises(RunError, match="has format 'other/1'; this fcp reads 'fcp-launch/1'"):
        read_launch(tmp_path)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    launched = write_launch(tmp_path, training={"steps": 3}, environment={"FCP_PLAN": "p"}, manifest="lengths.parquet")
    assert launched.training == {"steps": 3}
    assert launched.manifests == (Path("lengths.parquet"),)


def test_a_damaged_record_names_the_key(tmp_path: Path) -> None:
    with raises(snapshot("RunError: FOLDER/launch.json is damaged: training is 4; it must be a mapping or absent")):
        write_launch(tmp_path, training=4)


@pytest.mark.parametrize("name", ["plan", "manifest", "model"])
def test_a_path_that_no_file_can_have_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=f"launch.json is damaged: {name} is .*without the character NUL"):
        write_launch(tmp_path, **{name: "a\0b"})


def test_the_settings_of_a_job_that_plans_online_are_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "online.json")
    with pytest.raises(RunError, match=r"cannot read .*online\.json: it is a pipe"):
        read_online_settings(tmp_path / "online.json")
