"""Files that no reader may trust: devices, pipes, holes of 40 GB, lines without an end."""

from __future__ import annotations

import io
import os
import threading
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from fcp_cli.errors import FcpError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.text import json_lines
from fcp_cli.util import inputs
from fcp_cli.util.inputs import (
    MOST_LIST_BYTES,
    bounded_lines,
    cached_by_file,
    open_input,
    open_records,
    read_records,
    read_text,
)
from tests.cli.planning_folder import fcp


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/random"])
def test_a_device_is_no_input(device: str) -> None:
    with pytest.raises(FcpError, match=f"^cannot read the file {device}: it is not a regular file$"):
        read_text(Path(device), error=FcpError, label="the file ")


def test_the_null_device_is_an_empty_file() -> None:
    assert read_text(Path(os.devnull), error=FcpError) == ""


def test_a_file_larger_than_its_bound_is_refused_unread(tmp_path: Path) -> None:
    path = sparse(tmp_path / "hole.json", 40 << 30)
    with pytest.raises(OSError, match="it is larger than 1 MiB"):
        open_input(path, most_bytes=1 << 20)
    with pytest.raises(FcpError, match="it is larger than 256 MiB"):
        read_text(path, error=FcpError)
    with pytest.raises(FcpError, match=f"it is larger than {MOST_LIST_BYTES >> 20} MiB"):
        read_records(path, error=FcpError)


def test_a_pipe_is_read_up_to_the_bound_and_refused_by_formats_that_seek(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def written(content: bytes) -> threading.Thread:
        def write() -> None:
            with suppress(BrokenPipeError):
                path.write_bytes(content)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        return thread

    thread = written(b"x: 1\n")
    assert read_text(path, error=FcpError) == "x: 1\n"
    thread.join()
    thread = written(b"x" * 3_000_000)
    with pytest.raises(FcpError, match="it is larger than 1 MiB"):
        read_text(path, error=FcpError, most_bytes=1 << 20)
    thread.join()
    written(b"")  # without a writer, a reader that takes the pipe would wait for ever
    with pytest.raises(OSError, match="it is a pipe, and this format is not read in order; save it as a file"):
        open_input(path, seekable=True)


def test_lengths_are_read_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "63"  # as the shell names the pipe of `<(...)`
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_text, args=("7\n8\n",), daemon=True)
    thread.start()
    assert read_manifest(path).length_tokens.tolist() == [7, 8]
    thread.join()


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_LINE_BYTES", 1 << 20)


@pytest.mark.usefixtures("short_lines")
def test_a_line_without_an_end_is_refused_with_its_number() -> None:
    lines = bounded_lines(io.BytesIO(b"short\n" + b"x" * (2 << 20)))
    assert next(lines) == b"short\n"
    with pytest.raises(OSError, match="line 2 is longer than 1 MiB"):
        next(lines)
    longest = b"x" * ((1 << 20) - 1) + b"\n"
    assert list(bounded_lines(io.BytesIO(longest + b"b"))) == [longest, b"b"]


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize(
    "command",
    [
        "profile fit /dev/zero -o out.yaml",
        "profile show /dev/zero",
        "profile --from-samples /dev/full -o out.yaml",
        "watch /dev/zero --json",
        "inspect /dev/zero",
        "check /dev/zero",
        "plan /dev/zero -o out.parquet",
        "--config /dev/zero list models",
        "manifest build hole.json --kind media --processor qwen3-vl -o out.parquet",
        "manifest build hole.jsonl --workers 1 -o out.parquet",
        "manifest build hole.jsonl --kind media --processor qwen3-vl -o out.parquet",
        "plan hole.jsonl -o out.parquet",
        "plan hole.csv -o out.parquet",
        "profile fit hole.jsonl -o out.yaml",
        "profile --analytic --model hole.yaml --cluster example-8x8 -o out.yaml",
    ],
)
def test_every_command_ends_in_one_line_on_a_device_or_a_hole_of_40_gigabytes(tmp_path: Path, command: str) -> None:
    for suffix in ("json", "jsonl", "csv", "yaml"):
        sparse(tmp_path / f"hole.{suffix}", 40 << 30)
    result = fcp(*command.split(), cwd=tmp_path)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and result.returncode in (1, 2), result.stderr[-500:]
    assert "memory" not in errors[0]


def test_a_cached_file_is_read_again_after_it_changed(tmp_path: Path) -> None:
    path, reads = tmp_path / "rows", list[str]()

    def read(file: Path) -> str:
        reads.append(file.read_text(encoding="utf-8"))
        return reads[-1]

    cached = cached_by_file(read, maxsize=2)
    with pytest.raises(FileNotFoundError):
        cached(path)
    path.write_text("one", encoding="utf-8")
    assert [cached(path), cached(path), reads] == ["one", "one", ["one"]]
    path.write_text("two", encoding="utf-8")
    os.utime(path, ns=(0, 0))
    assert cached(path) == "two"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_blank_lines_without_end_are_refused_at_the_first_of_many(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"blank.jsonl{suffix}"
    with pa.output_stream(path) as stream:  # compresses by the suffix of the name
        stream.write(b'{"length": 1}\n' + b" \t\r\n" * 200_000)
    lines = json_lines(path)
    assert next(lines).content == b'{"length": 1}\n'
    with pytest.raises(FcpError, match="100,000 blank lines end at line 100002; it is not a file of records"):
        next(lines)


def test_a_small_file_unpacks_to_a_bounded_multiple_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_UNPACKED_BYTES", 1 << 16)
    path = tmp_path / "lengths.jsonl.zst"
    with pa.output_stream(path) as stream:
        stream.write(b"1\n" * 4_000_000)
    assert path.stat().st_size < 1000
    with open_records(path) as stream, pytest.raises(OSError, match="unpacks to more than 1,100 times its size"):
        stream.read()
