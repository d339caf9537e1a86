from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, UsageError
from fcp_cli.manifest import build as build_module
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources import RowBatch, Source
from tests import messages
from tests.cli.planning_folder import fcp
from tests.manifest.datasets import build, write_jsonl, write_parquet, write_tree


class Rows(Source):
    """A source of `batches` batches of four rows; after the last one it raises `error`."""

    files = ()

    def __init__(self, batches: int, error: BaseException | None = None) -> None:
        self._batches = batches
        self.error = error

    def describe(self) -> dict[str, Any]:
        return {"kind": "test", "path": "/data"}

    def batches(self) -> Iterator[RowBatch]:
        for start in range(0, 4 * self._batches, 4):
            ids = np.arange(start, start + 4)
            yield RowBatch(rows=pa.record_batch({"id": ids, "length": ids + 1}), done=4)
        if self.error is not None:
            raise self.error


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_GROUP_ROWS", 10)


@pytest.mark.usefixtures("small_groups")
def test_row_groups_have_one_size_however_the_rows_come(tmp_path: Path) -> None:
    build_manifest(Rows(10), tmp_path / "m.parquet")
    footer = pq.read_metadata(tmp_path / "m.parquet")
    assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == [10, 10, 10, 10]
    assert read_manifest(tmp_path / "m.parquet").length_tokens.tolist() == list(range(1, 41))


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("batches", [0, 1, 7])
def test_ctrl_c_leaves_nothing_and_what_stood_there_stays(tmp_path: Path, batches: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_manifest(Rows(batches, KeyboardInterrupt()), tmp_path / "m.parquet")
    assert list(tmp_path.iterdir()) == []
    build_manifest(Rows(1), tmp_path / "m.parquet")
    before = (tmp_path / "m.parquet").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_manifest(Rows(batches, KeyboardInterrupt()), tmp_path / "m.parquet")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


class FullDisk(pq.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
    """Runs out of space at the second row group."""

    groups = 0

    def write_table(self, table: Any, row_group_size: int | None = None) -> None:
        self.groups += 1
        if self.groups == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_table(table, row_group_size)


@pytest.mark.usefixtures("small_groups")
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq, "ParquetWriter", FullDisk)
    with pytest.raises(FcpError) as caught:
        build_manifest(Rows(10), tmp_path / "m.parquet")
    assert f"cannot write {tmp_path}/m.parquet: No space left on device (" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FcpError, match=f"cannot write {tmp_path}/no/m.parquet"):
        build_manifest(Rows(1), tmp_path / "no" / "m.parquet")


def test_two_builds_of_one_source_are_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"text": "x" * n} for n in range(50)])
    contents = []
    for name in ("one.parquet", "two.parquet"):
        build(source, tmp_path / name)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]


def test_progress_adds_up_to_the_units_of_the_source(tmp_path: Path) -> None:
    from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source

    for source in (
        write_jsonl(tmp_path / "d.jsonl", [{"text": "x" * n} for n in range(50)]),
        write_parquet(tmp_path / "d.parquet", {"input_ids": [[1] * n for n in range(50)]}),
        write_tree(tmp_path / "tree", {f"{n}": b"x" for n in range(5)}),
    ):
        opened = open_source(source, detect_kind(source), SourceOptions())
        done: list[int] = []
        build_manifest(opened, tmp_path / "m.parquet", advance=done.append)
        assert sum(done) == (5 if opened.units is None else opened.units)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".arrow"])
def test_a_name_that_would_not_be_read_as_parquet_is_refused_before_anything_is_written(
    tmp_path: Path, suffix: str
) -> None:
    target = tmp_path / f"lengths{suffix}"
    target.write_text("before")
    with pytest.raises(
        UsageError, match=f"a manifest is a Parquet file, but .*lengths{suffix} is read as another format"
    ):
        build_manifest(Rows(1), target)
    assert target.read_text() == "before"


class Impossible(Rows):
    """Rows with a work factor that no sequence can have."""

    def batches(self) -> Iterator[RowBatch]:
        yield RowBatch(rows=pa.record_batch({"id": ["a", "b"], "length": [1, 2], "eta": [0.5, -1.0]}), done=2)


def test_a_manifest_that_could_not_be_read_replaces_none(tmp_path: Path) -> None:
    before = build_manifest(Rows(1), tmp_path / "m.parquet").table
    with messages.raises(
        snapshot(
            "ManifestError: m.parquet: row 1 of column 'eta' is -1.0; it must be a finite number > -1 (1 such row in all); FOLDER/m.parquet is as it was"
        )
    ):
        build_manifest(Impossible(1), tmp_path / "m.parquet")
    assert read_manifest(tmp_path / "m.parquet").content_hash() == before.content_hash()
    assert [path.name for path in tmp_path.iterdir()] == ["m.parquet"]


@pytest.mark.parametrize("name", ["lengths.txt", "lengths.csv"])
def test_a_file_of_lengths_needs_no_manifest(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("length\n5\n7\n" if name.endswith("csv") else "5\n7\n")
    refused = fcp("manifest", "build", name, cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (
        f"error: {name} holds lengths, which are planned as they are: fcp plan {name}; for texts name the folder that holds "
        f"{name}, for sizes of images and videos add --kind media"
    )
    assert read_manifest(tmp_path / name).length_tokens.tolist() == [5, 7]
    assert not (tmp_path / "lengths.parquet").exists()
