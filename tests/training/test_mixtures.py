"""Training on a mixture: the rows of each source, by any number of ranks as by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.training.data import open_data
from tests.cli.planning_folder import fcp
from tests.manifest.datasets import build, write_jsonl
from tests.runs.records import read_metrics
from tests.training.small_runs import run_fcp

pytestmark = [pytest.mark.distributed, pytest.mark.hf, pytest.mark.processes, pytest.mark.torch]

STEPS = 4
MIX = ("--mix", "en/lengths.parquet:2", "--mix", "de/lengths.parquet:1", "--mix", "de/lengths.parquet:5@2")
NAMED = ("--manifest", "de/lengths.parquet", "--manifest", "en/lengths.parquet")


def text(source: str, row: int) -> str:
    return f"{source} {row} " + "word " * (row * 7 % 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two manifests of one name, and plans that mix them for one rank and for two."""
    folder = tmp_path_factory.mktemp("mixture")
    for source, rows in (("en", 40), ("de", 9)):
        (folder / source).mkdir()
        data = write_jsonl(folder / source / "d.jsonl", [{"text": text(source, row)} for row in range(rows)])
        build(data, folder / source / "lengths.parquet")
    for ranks in (1, 2):
        options = ("--model", "qwen3-tiny", "--ranks", str(ranks), "--tokens-per-rank", str(4096 // ranks))
        batches = ("--global-batch-size", "6", "--steps", str(STEPS), "-o", f"{ranks}.parquet")
        planned = fcp("plan", *MIX, *options, *batches, cwd=folder)
        assert planned.returncode == 0, planned.stderr
    return folder


def train(folder: Path, ranks: int, *words: str) -> list[float]:
    """Losses of the steps."""
    run_dir = f"run-{ranks}"
    job = ("--plan", f"{ranks}.parquet", "--model", "qwen3-tiny", "--device", "cpu", "--run-dir", run_dir)
    done = run_fcp("launch", *job, "--precision", "fp32", "--checkpoint-every", "2", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in read_metrics(folder / run_dir / "metrics.jsonl") if line["kind"] == "step"]


def test_two_ranks_train_a_mixture_as_one_process_does_and_resume_it(folder: Path) -> None:
    alone = train(folder, 1, *NAMED)
    train(folder, 2, *NAMED, "--steps", "2")
    assert len(checkpoints(folder / "run-2" / "checkpoints")) == 1
    other_ranks = fcp("plan", "--continue-from", "run-2", "--ranks", "1", cwd=folder)
    assert "mixes manifests; name each with --mix FILE:WEIGHT, with its weight from now on" in other_ranks.stderr
    together = train(folder, 2, "--resume", "--steps", str(STEPS))
    assert len(together) == STEPS
    assert together == pytest.approx(alone, rel=1e-5)
    assert json.loads((folder / "run-2" / "launch.json").read_text())["manifest"] == [
        str(folder / source / "lengths.parquet") for source in ("en", "de")
    ]


def test_a_row_is_the_text_of_its_source_whatever_order_the_manifests_have(folder: Path) -> None:
    mixture = PlanReader(folder / "2.parquet").metadata.mixture
    assert mixture is not None
    assert [source.name for source in mixture.sources] == ["en/lengths.parquet", "de/lengths.parquet"]
    manifests = [folder / source / "lengths.parquet" for source in ("de", "en")]
    fetch = open_data(folder / "2.parquet", manifests, vocab_size=256, seed=0)
    for row, (source, at) in ((0, ("en", 0)), (39, ("en", 39)), (40, ("de", 0)), (48, ("de", 8))):
        assert bytes(fetch(row).astype("u1")).decode() == text(source, at)


def test_a_mixture_is_checked_against_all_its_manifests(folder: Path) -> None:
    build(write_jsonl(folder / "other.jsonl", [{"text": "other"}]), folder / "other.parquet")
    assert "is sound" in fcp("check", "2.parquet", *NAMED, cwd=folder).stdout
    assert fcp("inspect", "2.parquet", *NAMED, cwd=folder).returncode == 0
    for words, message in (
        (NAMED[:2], "the plan mixes en/lengths.parquet, which is none of de/lengths.parquet, or was changed since; "
                    "name it with --manifest"),
        ((*NAMED, "--manifest", "other.parquet"), "other.parquet is none of the manifests that the plan mixes: "
                                                  "en/lengths.parquet, de/lengths.parquet"),
    ):  # fmt: skip
        done = fcp("check", "2.parquet", *words, cwd=folder)
        assert (done.returncode, done.stderr) == (1, f"error: {message}\n")


def test_what_cannot_be_trained_is_one_line_before_anything_is_written(folder: Path) -> None:
    away = folder / "away"
    away.mkdir()
    shutil.copy(folder / "2.parquet", away)
    (away / "lengths.txt").write_text("5\n6\n7\n")
    sizes = [{"text_tokens": 9, "images": [{"height": 64, "width": 64}]}] * 5
    build(write_jsonl(away / "sizes.jsonl", sizes), away / "sizes.parquet", kind="media", processor="qwen3-vl")
    english, german = (f"../{source}/lengths.parquet" for source in ("en", "de"))
    options = ("--model", "qwen3-tiny", "--ranks", "1", "--global-batch-size", "4", "--steps", "1")
    for plan, words in (
        ("no-tokens.parquet", ("--mix", f"{english}:1", "--mix", "lengths.txt:1")),
        ("pictures.parquet", ("--mix", f"{english}:1", "--mix", "sizes.parquet:1")),
        ("plain.parquet", (english,)),
    ):
        planned = fcp("plan", *words, *options, "-o", plan, cwd=away)
        assert planned.returncode == 0, planned.stderr
    for plan, manifests, message in (
        ("2.parquet", (), "2.parquet was made from en/lengths.parquet, which is not next to it; name each of "
         "en/lengths.parquet, de/lengths.parquet with --manifest, or train on random tokens with --synthetic"),
        ("2.parquet", (german,), f"the plan mixes en/lengths.parquet, which is none of {german}, or was changed since; "
         "name it with --manifest"),
        ("no-tokens.parquet", (english, "lengths.txt"), "lengths.txt holds lengths only, no source of tokens; build it "
         "from its texts, or train on random tokens with --synthetic"),
        ("pictures.parquet", (english, "sizes.parquet"), "sizes.parquet holds images, but the bundled trainer only "
         "mixes texts; give a script of your own, whose fetch is fcp_cli.runtime.mixed_fetch"),
        ("plain.parquet", (english, german), "the plan is of one manifest, lengths.parquet, but --manifest names 2"),
    ):  # fmt: skip
        job = ("--plan", plan, "--model", "qwen3-tiny", "--device", "cpu", "--run-dir", "nothing")
        named = [word for path in manifests for word in ("--manifest", path)]
        done = fcp("launch", *job, *named, cwd=away)
        assert done.returncode in (1, 2)
        assert done.stderr.splitlines()[-1] == f"error: {message}"
        assert not (away / "nothing").exists()
