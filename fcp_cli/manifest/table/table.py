"""Planner input from a manifest: lengths and work factors as flat arrays (contract `fcp-manifest/1`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.manifest.table.columns import chunked
from fcp_cli.masks import MaskRows

_COLUMNS: Final = ("length_tokens", "eta", "vision_patches", "vision_patch_pairs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthTable:
    """The sequences of a manifest, one entry per row, in row order.

    Attributes:
        name: file name, for messages and plan metadata.
        length_tokens: [rows] int64, > 0.
        eta: [rows] mask factor of the papers (0 causal, 1 full), or None if all are 0.
        vision_patches: [rows] patches the vision encoder runs, or None.
        vision_patch_pairs: [rows] sum over frames or tiles of patches squared, or None.
        column: the column that the lengths were read from.
        masks: the masks of all rows; None if the manifest was built without.
    """

    name: str
    length_tokens: IntArray
    eta: FloatArray | None = None
    vision_patches: IntArray | None = None
    vision_patch_pairs: IntArray | None = None
    column: str = "length"
    masks: MaskRows | None = None

    def __len__(self) -> int:
        return len(self.length_tokens)

    @property
    def argument(self) -> str:
        """Command-line argument that names this table's file; `-` if it was piped."""
        return "-" if self.name == "stdin" else self.name

    def take(self, rows: IntArray) -> LengthTable:
        """Return the given rows, in the given order."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        taken: dict[str, Any] = {name: None if values is None else values[rows] for name, values in columns.items()}
        return LengthTable(name=self.name, column=self.column, **taken)

    def gather(self, rows: IntArray) -> LengthTable:
        """Return the given rows in the given order, with one sequential pass over each column."""
        order = np.argsort(rows)
        wanted = rows[order]
        found: dict[str, Any] = {}
        for name in _COLUMNS:
            column = getattr(self, name)
            found[name] = None if column is None else np.empty(len(rows), column.dtype)
            for first, part in () if column is None else chunked(column):
                here = slice(*np.searchsorted(wanted, (first, first + len(part))))
                found[name][order[here]] = part[wanted[here] - first]
        return LengthTable(name=self.name, column=self.column, **found)

    def content_hash(self) -> str:
        """SHA-256 of the columns that planning reads; independent of file layout and writer."""
        digest = hashlib.sha256(b"fcp-manifest/1")
        for column in (getattr(self, name) for name in _COLUMNS):
            if column is None:
                digest.update(b"absent")
                continue
            for _, part in chunked(column):
                digest.update(np.ascontiguousarray(part, dtype=column.dtype.newbyteorder("<")).data)
        return digest.hexdigest()
