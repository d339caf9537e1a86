"""Megatron-LM's indexed data set: lengths from the `.idx`, tokens and the largest token id from the `.bin`, if present.

Layout of `.idx` (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), little-endian:
magic 9 bytes, version u64 = 1, token type u8, sequences u64, documents u64, then at byte 34
sequence lengths int32, byte offsets into `.bin` int64, and the sequence index at each document's end int64.

Each sequence is a manifest row. Sequences are documents, unless preprocessing split them into sentences. Document
boundaries are not read: Megatron-LM itself samples across them.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources import RowBatch, Source
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import open_input
from fcp_cli.util.remote import RemoteFile, RemotePath

_HEADER: Final = struct.Struct("<9sQBQQ")
_MAGIC: Final = b"MMIDIDX\x00\x00"
_TOKEN_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_Tokens: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_BATCH_ROWS: Final = 1 << 17
_SCAN_TOKENS: Final = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronIndex(Source):
    """An opened `.idx`.

    Attributes:
        path: the `.idx` file, absolute.
        sequences: number of sequences.
        token_type: numpy type of a token in the `.bin`.
        vocab_size: one more than the largest token id, if given; else the `.bin` is scanned.
    """

    files = ()
    path: Path
    sequences: int
    token_type: str
    vocab_size: int | None = None

    @classmethod
    def open(cls, path: Path, *, vocab_size: int | None = None) -> MegatronIndex:
        """Read and check the header."""
        try:
            with open_input(path, seekable=True) as stream:
                header = stream.read(_HEADER.size)
            size = path.stat().st_size
        except OSError as error:
            raise ManifestError(f"cannot read {path}: {error.strerror or error}") from error
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise ManifestError(f"{path} is not a Megatron index: it does not start with MMIDIDX")
        _, version, code, sequences, documents = _HEADER.unpack(header)
        if version != 1 or code not in _TOKEN_TYPES:
            raise ManifestError(
                f"{path} has index version {version} and token type {code}; fcp reads version 1, integers"
            )
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size < expected:
            raise ManifestError(f"{path} is truncated: {size} bytes, but {sequences} sequences need {expected}")
        return cls(path=path, sequences=sequences, token_type=_TOKEN_TYPES[code], vocab_size=vocab_size)

    @property
    def units(self) -> int | None:
        return self.sequences

    @property
    def bin(self) -> Path:
        """The file with the tokens."""
        return self.path.with_suffix(".bin")

    def describe(self) -> dict[str, Any]:
        return {"kind": "megatron", "path": str(self.path)}

    def batches(self) -> Iterator[RowBatch]:
        known = -1 if self.vocab_size is None else self.vocab_size - 1
        tokens = self.tokens() if self.vocab_size is None and self.bin.exists() else None
        for start in range(0, self.sequences, _BATCH_ROWS):
            lengths = self.lengths()[start : start + _BATCH_ROWS].astype(np.int64)
            ids = np.arange(start, start + len(lengths))
            largest = known if tokens is None else self._largest_token(tokens, ids, lengths)
            yield RowBatch(
                rows=pa.record_batch({"id": ids, "length": lengths}), done=len(lengths), largest_token=largest
            )

    def tokens(self) -> _Tokens:
        """Memory-map the `.bin`; in an object store, read ranges of it on access: [tokens]."""
        try:
            size = self.bin.stat().st_size // np.dtype(self.token_type).itemsize
            # An empty file cannot be mapped.
            return _mapped(self.bin, self.token_type, 0, size) if size else np.empty(0, self.token_type)
        except OSError as error:
            raise ManifestError(
                f"cannot read {self.bin}, which holds the tokens of {self.path}: {error.strerror}"
            ) from error

    def span(self, tokens: _Tokens, sequence: int, byte_offset: int, length: int) -> _Tokens:
        """Return the tokens of one sequence."""
        start = byte_offset // tokens.itemsize
        if not 0 <= start <= start + length <= len(tokens):
            raise ManifestError(
                f"{self.bin} is truncated: sequence {sequence} ends at token {start + length} of {len(tokens)}"
            )
        return tokens[start : start + length]

    def _largest_token(self, tokens: _Tokens, ids: IntArray, lengths: IntArray) -> int:
        """Find the largest token of a range of sequences, in constant memory."""
        first_byte, last_byte = (int(self.byte_offsets()[sequence]) for sequence in (ids[0], ids[-1]))
        self.span(tokens, int(ids[-1]), last_byte, int(lengths[-1]))
        start, stop = first_byte // tokens.itemsize, last_byte // tokens.itemsize + int(lengths[-1])
        chunks = (tokens[at : min(at + _SCAN_TOKENS, stop)] for at in range(start, stop, _SCAN_TOKENS))
        return max((int(chunk.max()) for chunk in chunks), default=-1)

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Memory-map the number of tokens of each sequence: [sequences]."""
        lengths: np.ndarray[Any, np.dtype[np.int32]] = _mapped(self.path, "<i4", _HEADER.size, self.sequences)
        return lengths

    def byte_offsets(self) -> IntArray:
        """Memory-map the byte offset of each sequence in the `.bin`: [sequences]."""
        starts: IntArray = _mapped(self.path, "<i8", _HEADER.size + 4 * self.sequences, self.sequences)
        return starts


class _Ranges:
    """Array in a remote object; each index or slice reads a byte range. Thread-safe."""

    def __init__(self, path: RemotePath, kind: str, offset: int, count: int) -> None:
        self._file, self._kind = RemoteFile(path, reads_ahead=False), np.dtype(kind)
        self._offset, self._count = offset, count
        self._lock = threading.Lock()
        self.itemsize = self._kind.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        start, stop, _ = at.indices(self._count) if isinstance(at, slice) else (int(at), int(at) + 1, 1)
        with self._lock:
            self._file.seek(self._offset + start * self.itemsize)
            found = np.frombuffer(self._file.read(max(stop - start, 0) * self.itemsize), self._kind)
        return found if isinstance(at, slice) else found[0]


def _mapped(path: Path, kind: str, offset: int, count: int) -> Any:
    """Memory-map `count` numbers of a numpy type from byte `offset` on."""
    if isinstance(path, RemotePath):
        return _Ranges(path, kind, offset, count)
    return np.memmap(path, kind, "r", offset, (count,))


class MegatronTokens:
    """Random access to the tokens of a `.bin`; `sequences` maps rows to sequence indices."""

    def __init__(self, index: MegatronIndex, sequences: IntArray) -> None:
        self._index = index
        self._sequences = sequences
        self._lengths, self._byte_offsets = index.lengths(), index.byte_offsets()
        self._tokens = index.tokens()

    def __call__(self, row: int) -> IntArray:
        sequence = int(self._sequences[row])
        if sequence >= len(self._lengths):
            raise ManifestError(f"{self._index.path} has no sequence {sequence} any more")
        byte_offset, length = int(self._byte_offsets[sequence]), int(self._lengths[sequence])
        return self._index.span(self._tokens, sequence, byte_offset, length).astype(np.int64)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; if not recorded, the first access scans the `.bin`."""
        if self._index.vocab_size is not None:
            return self._index.vocab_size
        return 1 + max((batch.largest_token for batch in self._index.batches()), default=-1)

    def place(self, row: int) -> str:
        return f"{self._index.bin} (sequence {self._sequences[row]})"
