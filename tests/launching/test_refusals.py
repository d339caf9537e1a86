from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, PlanError, RunError
from fcp_cli.launching import refusals
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import Continuation
from fcp_cli.runs.checkpoints import CheckpointHeader, FileSums, check_unfinished
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util import machine
from tests.launching.jobs import local_job
from tests.messages import raises
from tests.runs.records import write_launch, write_steps
from tests.training.small_runs import write_manifest, write_small_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    return write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=3)


def test_a_good_plan_gives_its_metadata(plan: Path) -> None:
    assert read_proven(plan).num_ranks == 4


def test_an_edited_plan_is_one_line(plan: Path, tmp_path: Path) -> None:
    table = pq.read_table(plan)
    edited = table.set_column(7, "seconds", pa.array([second * 2 for second in table["seconds"].to_pylist()]))
    path = tmp_path / "edited.parquet"
    pq.write_table(edited.cast(table.schema), path)
    with pytest.raises(PlanError) as error:
        read_proven(path)
    assert str(error.value) == (
        f"{path} was edited: its content does not match its plan hash; make it again with: fcp plan lengths.parquet "
        "--ranks 4 --ranks-per-node 4 --tokens-per-rank 4096 --sync iteration --global-batch-size 6 --no-shuffle "
        f"--solver 'by hand' -o {path.with_name('edited-2.parquet')}"
    )


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package look as if it were not installed."""
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == package else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_library_is_named_with_the_pip_line(
    package: str, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    needs = {
        "torch": "torch is not installed here, and training needs it",
        "transformers": "transformers is not installed here, and the bundled trainer needs it",
    }
    with raises(
        f"RunError: {needs[package]}; run: pip install 'pillow>=12.3.0' 'scipy>=1.10' 'tokenizers>=0.20' 'torch>=2.7' 'transformers>=5.3'"
    ):
        if package == "torch":
            machine.find_machine()
        refusals.check_trainer(read_proven(plan), plan, needs_transformers=True)
    if package == "transformers":
        refusals.check_trainer(read_proven(plan), plan, needs_transformers=False)


def test_all_steps_of_a_plan_may_be_asked_for(plan: Path) -> None:
    refusals.check_steps(plan, read_proven(plan), 3)
    with pytest.raises(RunError, match=r"--steps is 4, but .*/plan\.parquet ends after 3"):
        refusals.check_steps(plan, read_proven(plan), 4)


def test_a_finished_run_has_nothing_to_resume_and_another_plan_is_refused(plan: Path, tmp_path: Path) -> None:
    metadata = read_proven(plan)
    with pytest.raises(RunError, match=f"was trained under the plan 0000, but this one is {metadata.plan_hash[:12]}"):
        refusals.check_resumable(tmp_path, write_launch(tmp_path, plan_hash="0000"), metadata, None)
    launched = write_launch(tmp_path, plan_hash=metadata.plan_hash)
    for step in (1, 2):
        write_header(tmp_path, step, metadata.plan_hash)
    with raises(
        snapshot(
            "RunError: FOLDER/checkpoints/step-00000002 has finished 2 steps, but FOLDER/metrics.jsonl records 0: steps 1 to 2 are in no record; resume with --accept-unrecorded, or remove step-00000001 and step-00000002 to train them again from the beginning"
        )
    ):
        refusals.check_resumable(tmp_path, launched, metadata, None)
    refusals.check_resumable(tmp_path, launched, metadata, None, accepts_unrecorded=True)
    write_steps(tmp_path / "metrics.jsonl", 2)
    refusals.check_resumable(tmp_path, launched, metadata, None)
    with raises(
        snapshot("RunError: FOLDER has finished 2 of 2 steps: nothing to resume; give a larger --steps; the plan has 3")
    ):
        refusals.check_resumable(tmp_path, launched, metadata, 2)
    check_unfinished(tmp_path, tmp_path, 2, last_step=3, end_step=3)
    (tmp_path / "model").mkdir()
    for weights in ("", f" and with --weights {tmp_path}/model"):
        with pytest.raises(RunError) as error:
            check_unfinished(tmp_path, tmp_path, 3, last_step=3, end_step=3)
        assert str(error.value) == (
            f"{tmp_path} has finished 3 of 3 steps: nothing to resume; the plan ends there; for more, plan "
            f"again, and start a new run without --resume{weights}"
        )
        (tmp_path / "model" / "config.json").write_text("{}")
    write_header(tmp_path, 2, "f" * 64)
    with pytest.raises(RunError, match=f"made under the plan ffffffffffff, but this one is {metadata.plan_hash[:12]}"):
        refusals.check_resumable(tmp_path, launched, metadata, None)


def test_a_checkpoint_without_one_of_its_files_is_refused_before_anything_is_started(
    plan: Path, tmp_path: Path
) -> None:
    metadata = read_proven(plan)
    write_header(tmp_path, 1, metadata.plan_hash)
    write_header(tmp_path, 2, metadata.plan_hash, files={"state.safetensors": FileSums(bytes=8, crc32=(0,))})
    with raises(
        snapshot(
            "RunError: FOLDER/checkpoints/step-00000002/state.safetensors is missing or unreadable: No such file or directory; remove FOLDER/checkpoints/step-00000002 to resume from step-00000001"
        )
    ):
        refusals.check_resumable(tmp_path, write_launch(tmp_path, plan_hash=metadata.plan_hash), metadata, None)


def write_header(run_dir: Path, step: int, plan_hash: str, *, files: Mapping[str, FileSums] | None = None) -> None:
    """A checkpoint as far as it is looked at before anything is started."""
    header = CheckpointHeader(
        step=step,
        plan_hash=plan_hash,
        num_ranks=4,
        sharding="replicated",
        model="qwen3-tiny",
        torch="2",
        files=files or {},
    )
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint.json").write_text(header.text())


def test_a_plan_that_continues_a_run_begins_no_new_one(plan: Path, tmp_path: Path) -> None:
    metadata = replace(
        read_proven(plan),
        continues=Continuation(plan_hash="0" * 64, num_ranks=8, first_step=7, trained=""),
    )
    with raises(
        snapshot(
            "RunError: FOLDER/plan.parquet continues from step 7 of a run under the plan 000000000000; resume that run: fcp launch --plan FOLDER/plan.parquet --run-dir RUN --resume"
        )
    ):
        refusals.check_beginning(plan, metadata)
    with raises(
        snapshot(
            "RunError: the plan continues from step 7, but FOLDER has no checkpoint to continue from; start a new run with a plan of all steps"
        )
    ):
        refusals.check_resumable(tmp_path, write_launch(tmp_path, plan_hash=metadata.plan_hash), metadata, None)


def test_a_run_dir_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises(
        snapshot("FcpError: cannot write the run directory FOLDER/file/run: Not a directory; choose another --run-dir")
    ):
        refusals.check_run_dir(local_job(run_dir=tmp_path / "file" / "run"))


def test_a_full_disk_is_found_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1_000_000_000))
    settings = TrainSettings(plan=Path("plan.parquet"), model="qwen3-8b", run_dir=Path("run"))
    with pytest.raises(FcpError, match=r"has 1.0 GB free, but 3 checkpoints and the exported model need 360.5 GB"):
        refusals.check_run_dir(local_job(run_dir=tmp_path, settings=settings))
    with pytest.raises(FcpError, match="GB free"):
        refusals.check_run_dir(local_job(run_dir=tmp_path / "run", settings=settings))
    assert list(tmp_path.iterdir()) == []


# What two nodes are given -> number of this node, address of node 0, and run folder.
NODES: dict[str, tuple[int | None, str | None, Path | None]] = {
    "no address": (0, None, Path("run")),
    "no host": (0, "-x", Path("run")),
    "an address that each node has": (0, "localhost", Path("run")),
    "no number": (None, "10.0.0.1", Path("run")),
    "a number beyond the nodes": (2, "10.0.0.1", Path("run")),
    "no folder that they share": (1, "10.0.0.1", None),
}
NODES_MESSAGES = snapshot(
    {
        "no address": "UsageError: --nodes 2 needs --master-addr: the address of node 0, the same on every node",
        "no host": "UsageError: --master-addr is '-x'; it must be the name or the address of node 0",
        "an address that each node has": "UsageError: --master-addr localhost means another machine on each of 2 nodes; give node 0's address",
        "no number": "UsageError: --nodes 2 needs --node-rank, 0 to 1, on each node; --dry-run prints all commands",
        "a number beyond the nodes": "UsageError: --node-rank is 2; with --nodes 2 it must be 0 to 1",
        "no folder that they share": "UsageError: --nodes 2 needs --run-dir: a folder that all nodes share, the same on every node",
    }
)


@pytest.mark.parametrize("case", NODES)
def test_several_nodes_must_be_able_to_meet_and_write_to_one_place(case: str) -> None:
    with raises(NODES_MESSAGES[case]):
        refusals.check_nodes(2, *NODES[case])
