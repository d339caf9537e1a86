"""The place of a line in messages: its number, counted when somebody reads it."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from fcp_cli.manifest import sources
from fcp_cli.manifest.records import place_of
from fcp_cli.manifest.sources import LinePlace

LINES = b"one\n\nthree\nfour"


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
@pytest.mark.parametrize(("byte", "line"), [(0, 1), (4, 2), (5, 3), (11, 4)])
def test_a_line_is_named_by_its_number(
    name: str, byte: int, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 3)
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES) if path.suffix == ".gz" else LINES)
    for place in (LinePlace(path, byte), pickle.loads(pickle.dumps(LinePlace(path, byte)))):
        assert f"{place}" == str(place) == f"{path}:{line}"


def test_where_no_line_begins_or_none_can_be_counted_the_byte_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(LINES)
    assert f"{LinePlace(path, 2)}" == f"{path} at byte 2"
    assert f"{LinePlace(path, 99)}" == f"{path} at byte 99"
    assert f"{LinePlace(path.with_suffix('.tar'), 4)}" == f"{tmp_path}/d.tar at byte 4"
    assert f"{LinePlace(tmp_path / 'gone.jsonl', 4)}" == f"{tmp_path}/gone.jsonl at byte 4"
    monkeypatch.setattr(sources, "_MOST_BYTES", 4)
    assert f"{LinePlace(path, 5)}" == f"{path} at byte 5"


def test_records_of_other_files_are_named_by_their_number() -> None:
    assert place_of(Path("d.json"), 0) == "d.json, record 1"
    assert place_of(Path("d.parquet"), 0) == "d.parquet, row 0"
