"""A folder of text files: each file is a sequence; files are in name order within each folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch, grouped
from fcp_cli.manifest.tokenizing.tokenizer import ByteTokenizer, Tokenizer
from fcp_cli.reading.inputs import open_input
from fcp_cli.reading.remote import RemotePath

_SNIFF_BYTES: Final = 8192  # a NUL byte in here marks a binary file, as in git and grep
_BATCH_FILES: Final = 1024
_BATCH_BYTES: Final = 32 << 20
_MOST_TEXT_BYTES: Final = 1 << 31  # a sequence length has 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTree:
    """Text files under `root`; skips hidden names, binary files and links to folders.

    Attributes:
        include: globs of files to read; one with a slash is matched with the path below `root`, else with the name.
        exclude: globs of files and folders to skip, matched in the same way.
        output: absolute path of the manifest being written, which is skipped.
    """

    root: Path
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    tokenizer: Tokenizer
    output: Path | None = None

    @property
    def units(self) -> int | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "text",
            "path": str(self.root),
            "tokenizer": self.tokenizer.name,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "vocab_size": self.tokenizer.vocab_size,
        }

    def batches(self) -> Iterator[RowBatch]:
        for names in grouped(self._files(self.root, ""), most_items=_BATCH_FILES, most_bytes=_BATCH_BYTES):
            yield self._count(names)

    def _count(self, names: list[str]) -> RowBatch:
        if isinstance(self.tokenizer, ByteTokenizer):
            sizes = [(name, _text_bytes(self.root / name)) for name in names]
            kept = [(name, size) for name, size in sizes if size >= 0]
            lengths = pa.array([size for _, size in kept], pa.int64())
        else:
            texts = [(name, _read(self.root / name)) for name in names]
            kept = [(name, len(text)) for name, text in texts if not _is_binary(text)]
            contents = pa.array([text for _, text in texts if not _is_binary(text)], pa.large_binary())
            lengths = pa.array(self.tokenizer.count(contents))
        ids = pa.array([name for name, _ in kept], pa.string())
        rows = pa.record_batch({"id": ids, "length": lengths})
        return RowBatch(rows=rows, done=len(names), skipped={"binary": len(names) - len(kept)})

    def _files(self, folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield paths below `root`, with file sizes in bytes."""
        with _naming(folder):
            found: Iterable[Any] = folder.iterdir() if isinstance(folder, RemotePath) else os.scandir(folder)
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name, path = prefix + entry.name, folder / entry.name
            if entry.name.startswith(".") or path == self.output or _matches(name, self.exclude):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(path, f"{name}/")
            elif entry.is_file() and _matches(name, self.include):
                with _naming(path):
                    name.encode("utf-8")  # raises if the name is not UTF-8: the manifest could not store it
                    yield name, entry.stat().st_size


class TextTokens:
    """Random access to the tokens of text files; `ids` are paths below `root`."""

    def __init__(self, root: Path, ids: Any, tokenizer: Tokenizer) -> None:
        self._root = root
        self._ids = ids
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size

    def __call__(self, row: int) -> IntArray:
        return self._tokenizer.encode(_read(self._root / self._ids[int(row)].as_py()))

    def place(self, row: int) -> str:
        return str(self._root / self._ids[int(row)].as_py())


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatch(name if "/" in glob else base, glob) for glob in globs)


def _text_bytes(path: Path) -> int:
    """Return the size of a text file, or -1 for a binary one, reading only its first bytes."""
    with _naming(path), open_input(path) as file:
        return -1 if _is_binary(file.read(_SNIFF_BYTES)) else path.stat().st_size


def _is_binary(text: bytes) -> bool:
    return b"\0" in text[:_SNIFF_BYTES]


def _read(path: Path) -> bytes:
    with _naming(path), open_input(path, most_bytes=_MOST_TEXT_BYTES) as file:
        return file.read()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise ManifestError(
            f"{str(path)!a} has a name that is not UTF-8; rename it or exclude it with --exclude"
        ) from error
