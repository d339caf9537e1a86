"""Tars whose headers lie."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from fcp_cli.errors import ManifestError
from fcp_cli.reading.tar import tar_content, tar_files


def written(path: Path, *, sizes: tuple[int, ...] = (700, 700)) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = size
            tar.addfile(info, io.BytesIO(b"x" * size))
    return path


def with_size(content: bytes, field: bytes) -> bytes:
    """Put another size into the first header, with the checksum that belongs to it."""
    header = bytearray(content[:512])
    header[124:136] = field.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def read(path: Path) -> list[int]:
    with path.open("rb") as stream:
        files = tar_files(path, stream, error=ManifestError)
        return [len(tar_content(tar, member, error=ManifestError)) for tar, member in files]


def test_the_files_of_a_tar_are_read(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.tar")) == [700, 700]


@pytest.mark.parametrize(
    "size", [b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"7" * 11, b"-0000000001", b"nonsense"], ids=repr
)
def test_an_impossible_size_is_refused_in_one_line(tmp_path: Path, size: bytes) -> None:
    path = written(tmp_path / "a.tar")
    path.write_bytes(with_size(path.read_bytes(), size))
    with pytest.raises(ManifestError, match=r"a\.tar") as raised:
        read(path)
    assert len(str(raised.value).splitlines()) == 1


def test_a_torn_tar_is_refused_and_names_the_file_within(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ManifestError, match=r"a\.tar"):
        read(path)


def test_every_cut_and_every_changed_byte_of_a_header_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", sizes=(5,))
    content = path.read_bytes()
    for at in range(0, 512, 7):
        for value in (0, 255):
            path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            try:
                read(path)
            except ManifestError as error:
                assert len(str(error).splitlines()) == 1
