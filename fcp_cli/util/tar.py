"""Iterates over untrusted tars: ustar, GNU and pax formats.

Python's `tarfile` takes four times as long per header, keeps all headers in memory, and stops silently at a damaged
one.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from fcp_cli.errors import FcpError

_BLOCK: Final = 512
_MOST_EXTENDED_BYTES: Final = 1 << 20  # limit on a long name or pax header
_FILES: Final = (b"0", b"\0", b"7")
_WITHOUT_CONTENT: Final = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_LONG_NAME: Final = b"L"
_PAX: Final = (b"x", b"X", b"g")  # for the next file; "g" for all that follow
_EXTENDED: Final = (_LONG_NAME, b"K", *_PAX)
_SPARSE: Final = b"S"


class TarMember(NamedTuple):
    """A file in a tar.

    Attributes:
        name: path in the tar.
        offset: byte offset of its first header.
        offset_data: byte offset of its content.
        size: content size in bytes.
    """

    name: str
    offset: int
    offset_data: int
    size: int


class _Damaged(Exception):
    pass


def tar_files(path: Path, stream: IO[bytes], *, error: type[FcpError]) -> Iterator[TarMember]:
    """Yield the files in an uncompressed tar.

    Args:
        path: path for messages.
        stream: the tar, read from its current position; callers may seek between items.
        error: exception class to raise.
    """
    try:
        yield from _members(stream)
    except (_Damaged, OSError) as failure:
        raise error(f"{path} cannot be read as an uncompressed tar: {failure}") from failure


def tar_content(
    path: Path, stream: IO[bytes], member: TarMember, *, error: type[FcpError], most_bytes: int = 1 << 26
) -> bytes:
    """Return up to `most_bytes` of a file in a tar."""
    try:
        stream.seek(member.offset_data)
        return stream.read(min(member.size, most_bytes))
    except OSError as failure:
        raise error(f"{path}: {member.name} cannot be read: {failure}") from failure


class MemberStream(io.RawIOBase):
    """A file in a tar as a separate stream, for readers that seek."""

    def __init__(self, stream: IO[bytes], member: TarMember) -> None:
        self._stream, self._member, self._at = stream, member, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._member.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._member.offset_data + self._at)
        piece = self._stream.read(max(0, min(len(buffer), self._member.size - self._at)))
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _members(stream: IO[bytes]) -> Iterator[TarMember]:
    at = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    everywhere: dict[bytes, bytes] = {}
    own, first = dict[bytes, bytes](), at
    while at < end:
        stream.seek(at)
        kind, name, size = _header(stream.read(_BLOCK), at)
        if not kind:
            return
        if kind in _FILES and (b"size" in own or b"size" in everywhere):
            size = _decimal((everywhere | own)[b"size"], at)
        content = at + _BLOCK
        if kind not in _WITHOUT_CONTENT and content + size > end:
            raise _Damaged(f"the file ends within what the header at byte {at} describes")
        if kind in _EXTENDED:
            if size > _MOST_EXTENDED_BYTES:
                raise _Damaged(f"the header at byte {at} has {size:,} bytes of names")
            if kind == _LONG_NAME:
                own[b"path"] = stream.read(size).partition(b"\0")[0]
            elif kind in _PAX:
                (everywhere if kind == b"g" else own).update(_records(stream.read(size), at))
        else:
            name = own.get(b"path", everywhere.get(b"path", name))
            if kind == _SPARSE or any(key.startswith(b"GNU.sparse") for key in own):
                raise _Damaged(f"{_text(name)} is a sparse file; pack it without --sparse")
            if kind in _FILES and not name.endswith(b"/"):
                yield TarMember(_text(name), first, content, size)
            own = {}
        at = content if kind in _WITHOUT_CONTENT else content + -(-size // _BLOCK) * _BLOCK
        if kind not in _EXTENDED or kind == b"g":
            first = at


def _header(block: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Return kind, name and content size; an empty kind at the end-of-archive zeros."""
    fault = f"there is no header at byte {at}"
    if len(block) < _BLOCK or block[148] == 0:
        if not block.strip(b"\0"):
            return b"", b"", 0
        raise _Damaged(fault)
    stored = block[148:156]
    # Adler-32's lower half is 1 + the byte sum; the checksum field itself counts as spaces.
    counted = (zlib.adler32(block) & 0xFFFF) - 1 - sum(stored) + 8 * ord(" ")
    if (counted - _number(stored, fault)) % 65521:
        raise _Damaged(fault)
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":  # prefix of the name; other formats store times here
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return block[156:157], name, _number(block[124:136], f"the header at byte {at} has an impossible size")


def _number(field: bytes, fault: str) -> int:
    if field[0] == 0x80:  # base-256 encoding
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise _Damaged(fault)
    return int(digits or b"0", 8)


def _decimal(digits: bytes, at: int) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise _Damaged(f"the header at byte {at} has an impossible size")
    return int(digits)


def _records(content: bytes, at: int) -> dict[bytes, bytes]:
    """Parse the pax records used here: names, sizes and sparse maps."""
    if b" path=" not in content and b" size=" not in content and b" GNU.sparse" not in content:
        return {}
    found, start = dict[bytes, bytes](), 0
    while start < len(content.rstrip(b"\0")):
        digits = content[start : start + 20].partition(b" ")[0]
        length = _decimal(digits, at)
        key, mark, value = content[start + len(digits) + 1 : start + length - 1].partition(b"=")
        if not mark or start + length > len(content):
            raise _Damaged(f"the header at byte {at} has damaged pax records")
        found[key] = value
        start += length
    return found


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
