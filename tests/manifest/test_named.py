"""Several files, globs, compressed files and tars of JSON lines are one source; what is named wrongly is one line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source
from fcp_cli.manifest.sources import Part, named_source
from fcp_cli.manifest.text import json_lines
from fcp_cli.manifest.tokens import open_tokens
from tests.cli.planning_folder import fcp
from tests.manifest.datasets import tar, tokens_at, write_tokenizer, zstd

TEXTS = [f"row {n} " + "x" * (n * 7 % 90) for n in range(400)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]


def halves() -> tuple[bytes, bytes]:
    return b"".join(LINES[:150]), b"".join(LINES[150:])


FORMS: Mapping[str, Callable[[bytes], bytes]] = {
    "jsonl": lambda lines: lines,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": zstd,
    # Two members, and frames one after the other: all of a stream is read.
    "ndjson.gz": lambda lines: gzip.compress(lines[:100]) + gzip.compress(lines[100:]),
    "ndjson.zst": lambda lines: zstd(lines[:100]) + zstd(lines[100:]),
    "tar": lambda lines: tar({"b.jsonl": lines[:-1]}),
}


def manifest_of(words: list[str], output: Path, **options: Any) -> Path:
    path, files = named_source(words)
    build_manifest(open_source(path, detect_kind(path, files), SourceOptions(**options), files=files), output)
    return output


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_lines_has_the_rows_and_tokens_of_plain_ones(tmp_path: Path, form: str) -> None:
    for number, lines in enumerate(halves()):
        (tmp_path / f"{number}.{form}").write_bytes(FORMS[form](lines))
    output = manifest_of([str(tmp_path / f"*.{form}")], tmp_path / "m.parquet")
    assert pq.read_table(output).column("length").to_pylist() == [len(text) for text in TEXTS]
    tokens = open_tokens(output)
    for row in (0, 149, 150, 399, *random.Random(0).sample(range(400), 20)):
        assert bytes(tokens_at(tokens, row).astype("u1")).decode() == TEXTS[row]


@settings(max_examples=40)
@given(
    members=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=4),
    count=st.integers(1, 9),
)
def test_every_line_of_a_tar_belongs_to_one_part(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[int, bool]], count: int
) -> None:
    file = tmp_path_factory.mktemp("tars") / "t.tar"
    contents, wanted = {}, []
    for number, (lines, ends) in enumerate(members):
        # 512 bytes are a block of a tar: a member may fill its last one, with no zeros behind it.
        own = [
            f'{{"n": {number}, "m": {line}, "x": "{"y" * (483 if lines == 1 else line)}"}}'.encode()
            for line in range(lines)
        ]
        wanted += own
        contents[f"{number}.jsonl"] = b"\n".join(own) + b"\n" * (ends and bool(own))
    file.write_bytes(tar({"first.jsonl": b"", **contents}))
    spans = [next(Part(index, count).files([file.stat().st_size]), None) for index in range(count)]
    found = [line.content.strip() for span in spans if span for line in json_lines(file, *span[1:])]
    assert found == wanted


@pytest.mark.parametrize(("form", "cut"), [("jsonl.gz", 20), ("jsonl.zst", 5)])
def test_a_compressed_file_that_ends_early_is_refused(tmp_path: Path, form: str, cut: int) -> None:
    file = tmp_path / f"d.{form}"
    file.write_bytes(FORMS[form](halves()[0])[:-cut])
    with pytest.raises(ManifestError, match=f"cannot read .*d.{form}: "):
        manifest_of([str(file)], tmp_path / "m.parquet", column="text")
    assert not (tmp_path / "m.parquet").exists()


@pytest.mark.hf
@pytest.mark.processes
def test_processes_count_compressed_files_as_one_process_does(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    names = [tmp_path / "0.jsonl.zst", tmp_path / "1.jsonl.zst"]
    for name, lines in zip(names, halves(), strict=True):
        name.write_bytes(zstd(lines))
    found = []
    for workers in (1, 2):
        output = tmp_path / f"{workers}.parquet"
        words = ["manifest", "build", *names, "--tokenizer", tokenizer, "--workers", workers, "-o", output]
        assert fcp(*map(str, words), cwd=tmp_path).returncode == 0
        found.append(output.read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            ["a.jsonl", "*.jsonl"],
            UsageError,
            "FOLDER/a.jsonl is named twice: its sequences would be counted twice; name it once",
        ),
        (["*.parquet"], ManifestError, "no file matches *.parquet"),
        (["a.jsonl", "c.jsonl"], ManifestError, "there is no source c.jsonl"),
        (["a.jsonl", "."], UsageError, ". is a folder among several sources; name its files, as './*.jsonl'"),
    ],
)
def test_files_that_are_named_wrongly_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES[0])
    with pytest.raises(error) as raised:
        named_source(words)
    assert str(raised.value).replace(str(tmp_path), "FOLDER") == message
    assert named_source(["b.jsonl", "a.jsonl"]) == (tmp_path, (tmp_path / "b.jsonl", tmp_path / "a.jsonl"))


def test_a_compressed_table_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "d.parquet.gz").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"only JSON lines are read from .gz and .zst: unpack it"):
        detect_kind(tmp_path / "d.parquet.gz")
