"""Files of records: a kill leaves whole ones, and nothing damaged passes for what was written."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pytest

from fcp_cli.util.inputs import DamagedError
from fcp_cli.util.records import read_records, table_content, table_of_content, write_record

CONTENTS = [b"first", b"", b"x" * 300]  # longer than one byte can say


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    with path.open("wb") as file:
        for content in CONTENTS:
            write_record(file, content)
    return path


def test_records_come_back_up_to_the_last_whole_one(path: Path) -> None:
    whole = path.read_bytes()
    counts = set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found = list(read_records(path))
        assert found == CONTENTS[: len(found)]
        counts.add(len(found))
    assert counts == {0, 1, 2, 3}


def test_every_byte_is_covered_by_a_digest(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError, match=r"^its record [123] is damaged$"):
            list(read_records(path))


def test_offsets_that_leave_their_values_are_refused_before_anybody_follows_them() -> None:
    offsets = pa.py_buffer(struct.pack("<3i", 0, 2**30, 2))
    lists = pa.Array.from_buffers(pa.list_(pa.int32()), 2, [None, offsets], children=[pa.array([1, 2], pa.int32())])
    with pytest.raises(DamagedError):
        table_of_content(table_content(pa.table({"ranks": lists})))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"length": [1, None]}), "a column has nulls"),
        (pa.table({"ranks": [[1, None]]}), "a column has nulls"),
        (pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), "it has two columns named 'a'"),
    ],
)
def test_tables_with_gaps_or_names_twice_are_refused(table: pa.Table, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        table_of_content(table_content(table))


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"\xff\xff\xff\xff" + b"\x00" * 40])
def test_what_is_no_table_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedError):
        table_of_content(content)
