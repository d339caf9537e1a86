"""A manifest that is counted in parts is, byte for byte, the one that a single process writes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.manifest import text
from fcp_cli.manifest.build import CountedByWorkers, MergedParts, build_manifest, divisible, write_part
from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source
from fcp_cli.manifest.sources import WHOLE, Part, RowBatch, Source
from fcp_cli.manifest.tokenizer import ByteTokenizer
from fcp_cli.util import pool
from tests.cli.planning_folder import fcp
from tests.manifest.datasets import build, write_jsonl, write_parquet, write_tokenizer, write_tree
from tests.messages import raises

TEXTS = [{"text": "a b " * (n % 17), "seen": n % 17 if n % 3 else None} for n in range(200)]


def opened(source: Path, **options: Any) -> Source:
    return divisible(open_source(source, detect_kind(source), SourceOptions(**options)))


def merged(source: Source, folder: Path, count: int) -> bytes:
    """Write every part to a file of its own and merge them, the last one first."""
    paths = [folder / f"part-{index}.parquet" for index in range(count)]
    for index, path in enumerate(paths):
        part = Part(index, count)
        write_part(source, source.only(part), part, path, advance=lambda done: None)
    build_manifest(MergedParts(paths[::-1]), folder / "merged.parquet")
    return (folder / "merged.parquet").read_bytes()


def sources(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    shards = write_tree(folder / "shards", {})
    (folder / "shards").mkdir()
    for shard in range(3):
        write_parquet(shards / f"{shard}.parquet", {"text": ["a b " * (n % 7) for n in range(20)]}, row_group_size=6)
    lines = write_jsonl(folder / "d.jsonl", TEXTS)
    return {
        "json lines": (lines, {"tokenizer": str(write_tokenizer(folder / "tokenizer.json"))}),
        "masked json lines": (lines, {"mask": "prefix:seen"}),
        "shards of texts": (shards, {}),
        "token ids": (write_parquet(folder / "ids.parquet", {"input_ids": [[n] * (n % 5) for n in range(50)]}), {}),
    }


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "count"),
    [("json lines", 7), ("masked json lines", 2), ("shards of texts", 5), ("token ids", 1), ("token ids", 60)],
)
def test_merged_parts_are_the_manifest_of_one_build(tmp_path: Path, name: str, count: int) -> None:
    source, options = sources(tmp_path)[name]
    build(source, tmp_path / "whole.parquet", **options)
    assert merged(opened(source, **options), tmp_path, count) == (tmp_path / "whole.parquet").read_bytes()


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.lists(st.text("ab\r é", max_size=9), max_size=9), min_size=1, max_size=4),
    ends=st.booleans(),
    count=st.integers(1, 12),
)
def test_every_line_of_every_file_belongs_to_one_part(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[str]], ends: bool, count: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    for number, lines in enumerate(texts):
        content = "\n".join(f'{{"text": "{line}x"}}' if line else "" for line in lines).replace("\r", "\\r")
        (folder / f"{number}.jsonl").write_text(content + "\n" * ends, encoding="utf-8")
    files = tuple(sorted(folder.iterdir()))
    source = text.JsonLines(path=folder, files=files, column="text", tokenizer=ByteTokenizer())
    whole = [place for batch in source.batches() for place in placed(batch)]
    parts = [
        place
        for index in range(count)
        for batch in source.only(Part(index, count)).batches()
        for place in placed(batch)
    ]
    assert parts == whole


def placed(batch: RowBatch) -> list[tuple[int, int, int]]:
    columns = [batch.rows.column(name).to_pylist() for name in ("shard", "byte_offset", "length")]
    return list(zip(*columns, strict=True))


def by_workers(source: Path, part: Part = WHOLE) -> CountedByWorkers:
    reopen = partial(open_source, source, "jsonl", SourceOptions())
    return CountedByWorkers(source=opened(source).only(part), reopen=reopen, workers=2, part=part)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PART_BYTES", 700)


@pytest.mark.processes
@pytest.mark.usefixtures("small_parts")
def test_workers_count_a_part_as_one_process_does(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", TEXTS)
    build(source, tmp_path / "whole.parquet")
    halves = [Part(0, 2), Part(1, 2)]
    paths = [tmp_path / f"{half.index}.parquet" for half in halves]
    done: list[int] = []
    counted: list[Source] = [opened(source).only(halves[0]), by_workers(source, halves[1])]
    for half, path, rows in zip(halves, paths, counted, strict=True):
        write_part(opened(source), rows, half, path, advance=done.append)
    build_manifest(MergedParts(paths), tmp_path / "merged.parquet")
    assert (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert sum(done) == source.stat().st_size


@pytest.mark.processes
@pytest.mark.usefixtures("small_parts")
def test_a_fault_that_a_worker_meets_is_one_line_with_its_place(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [*TEXTS, {"other": 1}])
    with raises(
        snapshot("ManifestError: FOLDER/d.jsonl:201 has no field 'text'; its fields are other; name one with --column")
    ):
        build_manifest(by_workers(source), tmp_path / "m.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


@pytest.mark.processes
def test_a_worker_that_was_killed_is_one_line() -> None:
    found = pool.in_order(os._exit, [1], workers=1, initializer=print, arguments=(), noun="counting process")
    with raises(snapshot("FcpError: a counting process was killed, perhaps for lack of memory; try --workers 1")):
        list(found)


def test_shards_of_several_commands_become_one_manifest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", TEXTS)
    fcp("manifest", "build", "d.jsonl", "-o", "whole.parquet", cwd=tmp_path)
    for number in (1, 2, 3):
        fcp("manifest", "build", "d.jsonl", "--shard", f"{number}/3", "-o", f"{number}.parquet", cwd=tmp_path)
    result = fcp("manifest", "merge", "3.parquet", "1.parquet", "2.parquet", "-o", "merged.parquet", cwd=tmp_path)
    assert result.returncode == 0
    assert (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    refused = {
        words: fcp(*words.split(), cwd=tmp_path).stderr.splitlines()[-1]
        for words in (
            "manifest merge 1.parquet 3.parquet -o m.parquet",
            "manifest merge 1.parquet 2.parquet 2.parquet -o m.parquet",
            "manifest merge 1.parquet whole.parquet -o m.parquet",
            "manifest merge 1.parquet none.parquet -o m.parquet",
            "manifest merge 1.parquet -o 1.parquet",
            "plan 1.parquet",
            "manifest build d.jsonl --shard 4/3",
            "manifest build . --kind text --shard 1/2",
        )
    }
    assert refused == snapshot(
        {
            "manifest merge 1.parquet 3.parquet -o m.parquet": "error: missing: part 2/3; build it with --shard, and name all 3",
            "manifest merge 1.parquet 2.parquet 2.parquet -o m.parquet": "error: 2.parquet and 2.parquet are both part 2/3; name one",
            "manifest merge 1.parquet whole.parquet -o m.parquet": "error: whole.parquet is a length manifest, not a part of a length manifest; 'fcp plan whole.parquet' plans it",
            "manifest merge 1.parquet none.parquet -o m.parquet": "error: there is no none.parquet; make it: fcp manifest build SOURCE --shard I/N -o none.parquet",
            "manifest merge 1.parquet -o 1.parquet": "error: -o 1.parquet would overwrite the source; name another file with -o",
            "plan 1.parquet": "error: 1.parquet is a part of a length manifest, not a length manifest; 'fcp manifest merge' makes one of all parts",
            "manifest build d.jsonl --shard 4/3": "error: --shard 4/3 is not of the form I/N with 1 <= I <= N, for example 3/16",
            "manifest build . --kind text --shard 1/2": "error: --shard is for JSON lines, conversations, Parquet and Arrow; text cannot be read in parts",
        }
    )
    assert not (tmp_path / "m.parquet").exists()


def test_parts_of_other_builds_and_of_changed_files_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", TEXTS)
    parts = [Part(index, 2) for index in range(2)]
    paths = [tmp_path / f"{part.index}.parquet" for part in parts]

    def write(part: Part, **options: Any) -> None:
        whole = opened(source, **options)
        write_part(whole, whole.only(part), part, paths[part.index], advance=lambda done: None)

    write(parts[0])
    write(parts[1], mask="full")
    with raises(
        snapshot(
            "ManifestError: FOLDER/1.parquet is part 2/2 of FOLDER/d.jsonl column text tokenizer bytes mask full, but FOLDER/0.parquet is part 1/2 of FOLDER/d.jsonl column text tokenizer bytes; merge the parts of one build"
        )
    ):
        MergedParts(paths)
    os.utime(source, (1, 1))
    write(parts[1])
    with raises(
        snapshot("ManifestError: d.jsonl changed between FOLDER/0.parquet and FOLDER/1.parquet; build the parts again")
    ):
        MergedParts(paths)


def test_a_file_that_grows_while_it_is_read_ends_its_part(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", TEXTS)

    def grow(done: int) -> None:
        with source.open("a") as stream:
            stream.write('{"text": "more"}\n')

    with raises(snapshot("ManifestError: FOLDER/d.jsonl: d.jsonl changed while it was read; build again")):
        write_part(opened(source), opened(source), WHOLE, tmp_path / "part.parquet", advance=grow)
    assert not (tmp_path / "part.parquet").exists()


@pytest.mark.processes
def test_a_part_is_counted_again_only_if_its_content_is_another(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", TEXTS)
    part = ["manifest", "build", "d.jsonl", "--tokenizer", "bytes", "--shard", "1/2", "-o", "part.parquet"]
    assert "wrote" in fcp(*part, cwd=tmp_path).stderr
    before = (tmp_path / "part.parquet").stat().st_mtime_ns
    again = fcp(*part, "--json", cwd=tmp_path)
    assert "kept" in again.stderr
    assert json.loads(again.stdout)["sequences"] > 90
    assert (tmp_path / "part.parquet").stat().st_mtime_ns == before
    write_jsonl(tmp_path / "d.jsonl", [*TEXTS, {"text": "more"}])
    assert "wrote" in fcp(*part, cwd=tmp_path).stderr
