"""Engines count the parts of a build: what they are given, and what is never counted again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fcp_cli.manifest.engines import array_of, part_folder
from fcp_cli.manifest.sources.base import Part
from fcp_cli.manifest.sources.detect import SourceOptions, detect_kind, open_source
from tests.commands.planning_folder import fcp
from tests.manifest.datasets import write_jsonl

TEXTS = [{"text": "x" * (n % 40)} for n in range(1, 300)]
_SBATCH = """#!/bin/bash
echo "$@" >> submitted
echo 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "d.jsonl", TEXTS)
    return tmp_path


def run_array(folder: Path, numbers: list[int]) -> None:
    """Run the tasks of the array that was written, and the merge, as Slurm would."""
    for number in numbers:
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
        script = folder / "m.parquet.parts" / "count.sbatch"
        subprocess.run(["bash", str(script)], env=environment, cwd="/", check=True, capture_output=True)
    subprocess.run(["bash", str(folder / "m.parquet.parts" / "merge.sbatch")], cwd="/", check=True, capture_output=True)


@pytest.mark.processes
def test_an_array_of_slurm_and_its_merge_write_the_manifest_of_one_build(folder: Path) -> None:
    binaries = folder / "bin"
    binaries.mkdir()
    (binaries / "sbatch").write_text(_SBATCH)
    (binaries / "sbatch").chmod(0o755)
    path = f"{binaries}:{os.environ['PATH']}"
    build = ["manifest", "build", "d.jsonl", "--tokenizer", "bytes"]
    assert fcp(*build, "-o", "whole.parquet", cwd=folder).returncode == 0
    slurm = [*build, "-o", "m.parquet", "--on", "slurm", "--shards", "3", "--sbatch-option=--partition=cpu"]
    done = fcp(*slurm, cwd=folder, PATH=path)
    assert "submitted 3 parts as job 7, and their merge as job 7" in done.stderr
    parts = folder / "m.parquet.parts"
    assert (folder / "submitted").read_text().splitlines() == [
        f"--parsable {parts}/count.sbatch",
        f"--parsable --dependency=afterok:7 {parts}/merge.sbatch",
    ]
    assert "#SBATCH --array=1-3\n" in (parts / "count.sbatch").read_text()
    assert "#SBATCH --partition=cpu\n" in (parts / "merge.sbatch").read_text()
    run_array(folder, [1, 2, 3])
    assert (folder / "m.parquet").read_bytes() == (folder / "whole.parquet").read_bytes()
    # A part was lost: the same command submits that one.
    (parts / "part-2-of-3.parquet").unlink()
    assert "2 of 3 parts counted already" in fcp(*slurm, cwd=folder, PATH=path).stderr
    assert "#SBATCH --array=2\n" in (parts / "count.sbatch").read_text()


@pytest.mark.processes
def test_a_part_is_counted_again_only_if_its_content_is_another(folder: Path) -> None:
    part = ["manifest", "build", "d.jsonl", "--tokenizer", "bytes", "--shard", "1/2", "-o", "part.parquet"]
    assert "wrote" in fcp(*part, cwd=folder).stderr
    before = (folder / "part.parquet").stat().st_mtime_ns
    again = fcp(*part, "--json", cwd=folder)
    assert "kept" in again.stderr
    assert json.loads(again.stdout)["sequences"] > 100
    assert (folder / "part.parquet").stat().st_mtime_ns == before
    write_jsonl(folder / "d.jsonl", [*TEXTS, {"text": "more"}])
    assert "wrote" in fcp(*part, cwd=folder).stderr


def test_parts_of_another_tokenizer_or_number_are_missing(folder: Path) -> None:
    source = open_source(folder / "d.jsonl", detect_kind(folder / "d.jsonl"), SourceOptions())
    parts = part_folder(source, folder / "m.parquet", "ray", 4)
    assert parts.missing() == [Part(index, 4) for index in range(4)]
    assert part_folder(source, folder / "m.parquet", "ray", None).count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "spark"], "--on spark is neither ray, ray://HOST:PORT nor slurm"),
        (["--on", "slurm://x"], "--on slurm://x is neither ray, ray://HOST:PORT nor slurm"),
        (
            ["--on", "slurm", "--shard", "1/2"],
            "--shard counts one part here, and --on counts all of them elsewhere; use one of them",
        ),
        (["--shards", "2"], "--shards and --sbatch-option are for --on; one part of N is --shard I/N"),
        (["--on", "ray", "--sbatch-option=-x"], "--sbatch-option is for --on slurm, not --on ray"),
        (
            ["--on", "slurm", "--sbatch-option", "cpu"],
            "--sbatch-option 'cpu' is not an option of sbatch; write it as --partition=cpu",
        ),
    ],
)
def test_options_of_engines_that_do_not_fit_are_one_line(folder: Path, options: list[str], message: str) -> None:
    done = fcp("manifest", "build", "d.jsonl", *options, cwd=folder)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"error: {message}")
    assert not (folder / "lengths.parquet").exists()


def test_a_folder_of_text_has_no_parts(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    done = fcp("manifest", "build", "texts", "--on", "ray", cwd=folder)
    assert (done.returncode, "text is only read whole" in done.stderr) == (2, True)


def test_numbers_of_an_array_are_spans() -> None:
    assert array_of([Part(index, 20) for index in (0, 1, 2, 6, 8, 9)]) == "1-3,7,9-10"
