"""A file that a job's launcher has read whole is not read again by its ranks, and any other file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fcp_cli.util import records
from fcp_cli.util.records import VARIABLE, content_hash_of, verified_variable


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that a launcher has read, whose ranks this process is then one of."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(records, "_read_here", {})
    path = tmp_path / "plan.parquet"
    path.write_bytes(b"as the launcher read it")
    assert verified_variable() == {}
    assert content_hash_of(path, lambda: "hash") == "hash"
    monkeypatch.setenv(VARIABLE, verified_variable()[VARIABLE])
    return path


def never() -> str:
    raise AssertionError("the file is read again")


def test_a_rank_takes_the_hash_of_the_file_that_its_launcher_read(file: Path) -> None:
    assert content_hash_of(file, never) == "hash"


def test_a_launcher_reads_each_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert content_hash_of(file, lambda: "other") == "other"


def test_a_file_that_was_changed_or_replaced_since_is_read(file: Path, tmp_path: Path) -> None:
    times = file.stat()
    with file.open("r+b") as opened:  # as many bytes, and the time set back
        opened.write(b"AS")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_hash_of(file, lambda: "changed") == "changed"
    (tmp_path / "copy").write_bytes(b"as the launcher read it")
    (tmp_path / "copy").replace(file)
    assert content_hash_of(file, lambda: "replaced") == "replaced"


def test_another_column_of_a_file_is_read(file: Path) -> None:
    assert content_hash_of(file, lambda: "eta's", column="eta") == "eta's"


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"a": 5}'])
def test_a_variable_that_no_launcher_wrote_proves_nothing(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert content_hash_of(file, lambda: "read") == "read"


def test_nothing_is_passed_on_of_a_path_that_is_no_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_read_here", {})
    answers = iter(("of one folder", "of another"))
    found = [content_hash_of(tmp_path / name, lambda: next(answers)) for name in ("one", "another")]
    assert found == ["of one folder", "of another"]
    assert verified_variable() == {}
