"""`fcp plan --continue-from`: what it refuses and writes. Runs on other ranks: tests/training/test_resume.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.models.cluster import shipped_profile_path
from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.checkpoints import CheckpointHeader
from fcp_cli.runs.owner import own
from tests.cli.planning_folder import typed
from tests.runs.records import write_launch
from tests.training.small_runs import write_manifest, write_small_plan

Fcp = Callable[..., tuple[int, str]]
PROFILE = str(shipped_profile_path("qwen3-tiny"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `run`, which has trained two of four steps on four ranks."""
    plan = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=4, model="qwen3-tiny")
    manifest, plan_hash = str(tmp_path / "lengths.parquet"), PlanReader(plan).metadata.plan_hash
    (tmp_path / "run").mkdir()
    write_launch(tmp_path / "run", plan=str(plan), plan_hash=plan_hash, manifest=manifest)
    save(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(folder: Path, step: int, plan_hash: str | None = None) -> None:
    """A checkpoint of the run, as far as planning reads it."""
    header = CheckpointHeader(
        step=step,
        plan_hash=plan_hash or PlanReader(folder / "plan.parquet").metadata.plan_hash,
        num_ranks=4,
        sharding="replicated",
        model="qwen3-tiny",
        torch="2.7",
    )
    path = folder / "run" / "checkpoints" / f"step-{step:08d}" / "checkpoint.json"
    path.parent.mkdir(parents=True)
    path.write_text(header.text())


@pytest.fixture
def fcp() -> Fcp:
    """Run `fcp plan --continue-from run ...`: exit status and the last line on stderr."""

    def run(*words: str) -> tuple[int, str]:
        done = typed("plan", "--continue-from", "run", *words)
        return done.status, done.last_line

    return run


def test_the_plan_is_written_beside_the_old_one_and_the_next_command_named(fcp: Fcp, folder: Path) -> None:
    before = (folder / "plan.parquet").read_bytes()
    assert fcp("--ranks", "3", "--profile", PROFILE, "--solver", "fcp-paper") == snapshot(
        (
            0,
            "wrote plan-from-step-2.parquet; next: fcp launch --run-dir run --resume --plan plan-from-step-2.parquet",
        )
    )
    metadata = PlanReader(folder / "plan-from-step-2.parquet").metadata
    assert (metadata.num_ranks, metadata.first_step, metadata.end_step) == (3, 2, 4)
    assert (folder / "plan.parquet").read_bytes() == before


def test_a_run_that_still_trains_is_refused_until_it_has_ended(fcp: Fcp, folder: Path) -> None:
    with own(Path("run")):
        status, message = fcp("--ranks", "3", "--profile", PROFILE, "--solver", "fcp-paper")
    assert status == 1
    assert re.fullmatch(
        r"error: run is in use by a job on \S+ \(process \d+\), which began at .* UTC; watch it with 'fcp watch run', end "
        r"it there with 'kill \d+', or wait until it has ended: its next checkpoint would not fit the plan",
        message,
    )
    assert not list(folder.glob("plan-from-step-*"))
    assert fcp("--ranks", "3", "--profile", PROFILE, "--solver", "fcp-paper")[0] == 0


def test_what_it_needs_and_what_cannot_change_is_named(fcp: Fcp, folder: Path) -> None:
    assert fcp() == snapshot(
        (2, "error: --continue-from needs --ranks (how many continue the run) or --mix (the new weights)")
    )
    for words in (("--seed", "1"), ("--global-batch-size", "8"), ("--sync", "microbatch"), ("--epochs", "2")):
        assert fcp("--ranks", "3", *words) == (
            2,
            f"error: {words[0]} cannot change within a run; drop it",
        )
    status, message = fcp("--ranks", "3", "-o", "plan.parquet", "--profile", PROFILE)
    assert (status, message) == snapshot(
        (2, "error: -o plan.parquet would overwrite the source; name another file with -o")
    )


def test_a_run_that_cannot_be_continued_says_why(fcp: Fcp, folder: Path) -> None:
    save(folder, 4)
    assert fcp("--ranks", "3") == snapshot(
        (
            1,
            "error: run has finished all 4 steps of its plan: nothing is left to plan",
        )
    )
    save(folder, 5, plan_hash="0" * 64)
    status, message = fcp("--ranks", "3")
    assert status == 1
    assert message.startswith("error: run/checkpoints/step-00000005 was made under the plan 000000000000, but this one")

    shutil.rmtree(folder / "run" / "checkpoints")
    assert fcp("--ranks", "3") == snapshot(
        (
            1,
            "error: run has no checkpoint, so its training is lost; plan again with 'fcp plan lengths.parquet --ranks N'",
        )
    )
    (folder / "run" / "launch.json").unlink()
    assert fcp("--ranks", "3") == snapshot(
        (
            1,
            "error: run is not a run: it has no launch.json; name the folder of one, such as runs/qwen3-tiny-001",
        )
    )


def test_a_run_of_ones_own_script_is_its_own_business(fcp: Fcp, folder: Path) -> None:
    path = folder / "run" / "launch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "training": None, "program": ["mine.py"]}))
    assert fcp("--ranks", "3") == snapshot(
        (
            1,
            "error: run ran mine.py, whose checkpoints fcp cannot read; only runs of the bundled trainer can be continued",
        )
    )


def test_a_length_column_that_is_no_text_is_one_line(fcp: Fcp, folder: Path) -> None:
    path = folder / "run" / "launch.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "training": {**document["training"], "length_column": 5}}))
    assert fcp("--ranks", "3") == snapshot(
        (1, "error: run/launch.json is damaged: training.length_column is 5; it must be a text")
    )


def test_another_manifest_is_refused(fcp: Fcp, folder: Path) -> None:
    pq.write_table(pa.table({"length": [5, 6, 7]}), folder / "other.parquet")
    assert fcp("other.parquet", "--ranks", "3", "--profile", PROFILE) == (
        1,
        "error: other.parquet is not the manifest lengths.parquet that plan.parquet was made from, or it was changed "
        "since; name the right one: fcp plan MANIFEST --continue-from ...".replace(
            "plan.parquet was", f"{folder}/plan.parquet was"
        ),
    )


def test_a_budget_too_small_for_the_ranks_that_are_left_is_named(fcp: Fcp, folder: Path) -> None:
    status, message = fcp("--ranks", "1", "--tokens-per-rank", "100", "--profile", PROFILE)
    assert status == 1
    assert message == snapshot(
        "error: lengths.parquet: row 20 (629 tokens) is still to be trained, but 1 ranks of 100 tokens hold at most 100; give --tokens-per-rank 629, or at least 7 --ranks"
    )
    assert not (folder / "plan-from-step-2.parquet").exists()


def test_neither_a_manifest_nor_a_run_is_wrong_usage() -> None:
    done = typed("plan")
    assert (done.status, done.err) == snapshot(
        (2, "error: name the MANIFEST to plan, like 'fcp plan dataset.parquet', or a run with --continue-from\n")
    )
