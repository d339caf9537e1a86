"""Megatron-LM's indexed data set: lengths from the `.idx` alone, tokens from the `.bin` beside it.

Layout of `.idx` (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), little-endian:
magic 9 bytes, version u64 = 1, token type u8, sequences u64, documents u64, then at byte 34
sequence lengths int32, byte offsets into `.bin` int64, and the sequence index at each document's end int64.

A manifest row is a sequence. They are the documents unless the data was split into sentences when it was made;
document boundaries are not read, since Megatron-LM itself samples sequences through them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch
from fcp_cli.manifest.table import IntArray

_HEADER: Final = struct.Struct("<9sQBQQ")
_MAGIC: Final = b"MMIDIDX\x00\x00"
_TOKEN_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BATCH_ROWS: Final = 1 << 17
_SCAN_TOKENS: Final = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronIndex:
    """An opened `.idx`.

    Attributes:
        path: the `.idx` file, absolute.
        sequences: how many sequences it lists.
        token_type: numpy type of a token in the `.bin`.
    """

    path: Path
    sequences: int
    token_type: str

    @classmethod
    def open(cls, path: Path) -> MegatronIndex:
        """Read and check the header.

        Raises:
            ManifestError: the file is missing, truncated, or no Megatron index.
        """
        try:
            with path.open("rb") as stream:
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
        return cls(path=path, sequences=sequences, token_type=_TOKEN_TYPES[code])

    @property
    def units(self) -> int | None:
        return self.sequences

    def describe(self) -> dict[str, Any]:
        return {"kind": "megatron", "path": str(self.path)}

    def batches(self) -> Iterator[RowBatch]:
        for start in range(0, self.sequences, _BATCH_ROWS):
            lengths = self.lengths()[start : start + _BATCH_ROWS].astype(np.int64)
            ids = np.arange(start, start + len(lengths))
            yield RowBatch(rows=pa.record_batch({"id": ids, "length": lengths}), done=len(lengths))

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """[sequences] tokens, mapped from the file."""
        return np.memmap(self.path, "<i4", "r", _HEADER.size, (self.sequences,))

    def byte_offsets(self) -> IntArray:
        """[sequences] where each sequence starts in the `.bin`, mapped from the file."""
        return np.memmap(self.path, "<i8", "r", _HEADER.size + 4 * self.sequences, (self.sequences,))


class MegatronTokens:
    """Tokens of the `.bin` beside an index; `sequences` are the rows' numbers in it.

    Raises:
        ManifestError: the `.bin` is missing.
    """

    def __init__(self, index: MegatronIndex, sequences: IntArray) -> None:
        self._bin = index.path.with_suffix(".bin")
        self._sequences = sequences
        self._lengths, self._byte_offsets = index.lengths(), index.byte_offsets()
        self._type = np.dtype(index.token_type)
        try:
            self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(self._bin, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise ManifestError(f"cannot read {self._bin}, which holds the tokens of {index.path}: {error}") from error

    def __call__(self, row: int) -> IntArray:
        sequence = int(self._sequences[row])
        if sequence >= len(self._lengths):
            raise ManifestError(f"{self._bin.with_suffix('.idx')} has no sequence {sequence} any more; build again")
        start = int(self._byte_offsets[sequence])
        stop = start + int(self._lengths[sequence]) * self._type.itemsize
        if not 0 <= start <= stop <= len(self._bytes):
            raise ManifestError(
                f"{self._bin} is truncated: sequence {sequence} ends at byte {stop} of {len(self._bytes)}"
            )
        return self._bytes[start:stop].view(self._type).astype(np.int64)

    @cached_property
    def vocab_size(self) -> int:
        """Exact; the first use reads the whole `.bin` once, in constant memory."""
        usable = len(self._bytes) - len(self._bytes) % self._type.itemsize
        tokens = self._bytes[:usable].view(self._type)
        chunks = range(0, len(tokens), _SCAN_TOKENS)
        return 1 + max((int(tokens[start : start + _SCAN_TOKENS].max()) for start in chunks), default=-1)

    def place(self, row: int) -> str:
        return f"{self._bin} (sequence {self._sequences[row]})"
