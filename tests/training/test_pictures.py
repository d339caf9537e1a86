"""Fine-tuning on the pixels of real pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.manifest.picture_checkpoint import Family
from tests.runs.records import read_metrics
from tests.training.small_runs import run_fcp

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from fcp_cli.training.train import main
from tests.training.picture_runs import LEARNING_RATE, losses_of_one_process, write_run

pytestmark = [pytest.mark.torch, pytest.mark.hf]

STEPS = 3


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The step records of a run of four ranks from the checkpoint of a folder."""
    usual = ("--learning-rate", str(LEARNING_RATE), "--warmup-steps", "1", "--precision", "fp64", "--zero", "2")
    ended = run_fcp("launch", "--model", "checkpoint", *usual, *words, "--run-dir", "run", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_vl", ("--decode-workers", "0")),
        pytest.param("qwen3_vl", ("--freeze-vision", "--decode-workers", "1"), marks=pytest.mark.full),
        pytest.param("gemma4", ("--decode-workers", "0"), marks=pytest.mark.full),
        pytest.param("gemma4", ("--freeze-vision", "--decode-workers", "0"), marks=pytest.mark.full),
        pytest.param("internvl", ("--decode-workers", "1"), marks=pytest.mark.full),
        pytest.param("internvl", ("--freeze-vision", "--decode-workers", "0"), marks=pytest.mark.full),
    ],
    ids=[
        "Qwen3-VL",
        "Qwen3-VL frozen, in a process",
        "Gemma 4",
        "Gemma 4 frozen",
        "InternVL, in a process",
        "InternVL frozen",
    ],
)
def test_ranks_learn_of_pictures_what_one_process_learns(
    family: Family, words: tuple[str, ...], tmp_path: Path
) -> None:
    records = write_run(tmp_path, family, steps=STEPS)
    expected = losses_of_one_process(tmp_path, family, records, frozen="--freeze-vision" in words)
    found = [step["loss"] for step in train(tmp_path, *words)]
    # transformers computes Gemma's norms in fp32.
    assert found == pytest.approx(expected, rel=1e-7 if family == "gemma4" else 1e-12)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_ranks_learn_of_clips_beside_images_what_one_process_learns(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("av")
    records = write_run(tmp_path, family, steps=10, clips=True)
    expected = losses_of_one_process(tmp_path, family, records)
    found = [step["loss"] for step in train(tmp_path, "--decode-workers", "0")]
    assert len(found) == 10
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.processes
def test_ranks_skip_bad_rows_together(tmp_path: Path) -> None:
    records = write_run(tmp_path, "qwen3_vl", steps=STEPS)
    rows = [5, 14]
    expected = losses_of_one_process(tmp_path, "qwen3_vl", records, unlearned=rows)
    for row in rows:
        damage(tmp_path, records[row])
    found = train(tmp_path, "--bad-rows", "skip", "--decode-workers", "0")
    assert [step["loss"] for step in found] == pytest.approx(expected, rel=1e-12)
    assert sorted(row for step in found for row in step.get("bad_rows", [])) == rows


def damage(folder: Path, record: Mapping[str, Any]) -> None:
    """Cut a record's last picture off after its header."""
    file = folder / (record.get("image") or record["images"])[-1]
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.processes
def test_a_bad_row_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_run(tmp_path, "internvl", steps=2, num_ranks=1)
    expected = losses_of_one_process(tmp_path, "internvl", records, unlearned=[7])
    damage(tmp_path, records[7])
    plan = ["--plan", str(tmp_path / "plan.parquet"), "--manifest", str(tmp_path / "lengths.parquet")]
    model = ["--model", str(tmp_path / "checkpoint"), "--weights", str(tmp_path / "checkpoint"), "--device", "cpu"]
    words = [
        "--learning-rate",
        str(LEARNING_RATE),
        "--warmup-steps",
        "1",
        "--precision",
        "fp64",
        "--decode-workers",
        "0",
    ]
    arguments = [*plan, *model, *words, "--run-dir"]
    assert main([*arguments, str(tmp_path / "ends")]) == 1
    assert main([*arguments, str(tmp_path / "run"), "--bad-rows", "skip"]) == 0
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-12)
    assert [step.get("bad_rows") for step in steps] == [None, [7]]
    shown = capsys.readouterr().err
    assert "1 bad row" in shown
    lines = [line for line in shown.splitlines() if "row 7" in line]
    name = f"row 7 of the manifest ({tmp_path}/data.jsonl:8)"
    assert len(lines) == 2 and lines[0].startswith(f"error: {name}") and lines[1].startswith(f"step 1: skipped {name}")
    assert lines[0].endswith("; to train on without such rows: --bad-rows skip, or start(skip_bad_rows=True)")
    assert "skip_bad_rows" not in lines[1]
    assert "cannot be decoded" in lines[0] and str(tmp_path / records[7]["image"][-1]) in lines[0]
