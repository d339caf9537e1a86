"""Fine-tuning on the pixels of real pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fcp_cli.runs.metrics_reader import read_metrics
from tests.manifest.picture_checkpoint import Family
from tests.training.small_runs import run_fcp

pytest.importorskip("transformers")
pytest.importorskip("PIL")

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
        pytest.param("internvl", ("--decode-workers", "1"), marks=pytest.mark.full),
        pytest.param("internvl", ("--freeze-vision", "--decode-workers", "0"), marks=pytest.mark.full),
    ],
    ids=["Qwen3-VL", "Qwen3-VL frozen, two processes", "InternVL, two processes", "InternVL frozen"],
)
def test_ranks_learn_of_pictures_what_one_process_learns(
    family: Family, words: tuple[str, ...], tmp_path: Path
) -> None:
    records = write_run(tmp_path, family, steps=STEPS)
    expected = losses_of_one_process(tmp_path, family, records, frozen="--freeze-vision" in words)
    found = [step["loss"] for step in train(tmp_path, *words)]
    assert found == pytest.approx(expected, rel=1e-12)
