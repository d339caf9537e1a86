"""Tars whose headers lie."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fcp_cli.errors import ManifestError
from fcp_cli.util.tar import MemberStream, tar_content, tar_files


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
        return [len(tar_content(path, stream, member, error=ManifestError)) for member in files]


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


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60).map(
    lambda one: f"a{one}"
)
LONG = 11 * "a folder/" + 5 * "name"
PATHS = st.lists(NAMES, min_size=1, max_size=6).map("/".join)


@given(
    files=st.lists(
        st.tuples(PATHS, st.binary(max_size=1200), st.sampled_from(["file", "folder", "link"])), min_size=1, max_size=5
    ),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    time=st.sampled_from([0, 1.5, -1, 2**40]),
)
@example(files=[(LONG, b"x", "file"), ("b", b"y", "file")], form=tarfile.USTAR_FORMAT, time=0)
@example(files=[(3 * LONG, b"x", "file"), ("b", b"y", "file")], form=tarfile.GNU_FORMAT, time=0)
@example(files=[(3 * LONG, b"x", "file"), ("b", b"y", "file")], form=tarfile.PAX_FORMAT, time=0)
def test_files_are_those_that_the_standard_library_finds(
    files: list[tuple[str, bytes, str]], form: int, time: float
) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=form, pax_headers={"comment": "all"}) as archive:
        archive.addfile(tarfile.TarInfo("first"))
        for name, content, kind in files:
            info = tarfile.TarInfo(name)
            info.mtime = time  # pax keeps fractions in records of their own
            if kind == "file":
                info.size = len(content)
            else:
                info.type = tarfile.DIRTYPE if kind == "folder" else tarfile.SYMTYPE
                info.linkname = "" if kind == "folder" else name
            try:
                archive.addfile(info, io.BytesIO(content))
            except (ValueError, tarfile.HeaderError):  # ustar holds no long names, and no times below 0
                archive.offset = written.tell()
    with tarfile.open(fileobj=io.BytesIO(written.getvalue())) as archive:
        wanted = [
            (member.name, member.offset, member.offset_data, archive.extractfile(member).read())  # type: ignore[union-attr]
            for member in archive
            if member.isfile()
        ]
    stream = io.BytesIO(written.getvalue())
    found = [
        (*one[:3], tar_content(Path("a.tar"), stream, one, error=ManifestError))
        for one in tar_files(Path("a.tar"), stream, error=ManifestError)
    ]
    assert found == wanted


def test_a_damaged_header_in_the_middle_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", sizes=(5, 5))
    content = bytearray(path.read_bytes())
    content[1024] ^= 1
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="there is no header at byte 1024"):
        read(path)


def test_a_file_with_holes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.png")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.png"}
        archive.addfile(info)
    with pytest.raises(ManifestError, match=r"a\.png is a sparse file; pack it without --sparse"):
        read(path)


def test_a_member_is_a_stream_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", sizes=(700, 5))
    with path.open("rb") as stream:
        first, second = tar_files(path, stream, error=ManifestError)
        opened = MemberStream(stream, second)
        assert (opened.read(), opened.read(1), opened.seek(-2, io.SEEK_END), opened.read()) == (b"x" * 5, b"", 3, b"xx")
        assert (first.size, MemberStream(stream, first).seek(700)) == (700, 700)
