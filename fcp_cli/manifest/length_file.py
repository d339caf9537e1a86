"""Use a file of lengths, as `fcp plan` reads it, as a manifest source; it has no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources.base import RowBatch
from fcp_cli.manifest.table.checks import FACTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthFile:
    """A length per row, and work factors in further columns.

    Attributes:
        path: the file.
        column: length column of a table; None: `length` or another common name.
    """

    path: Path
    column: str | None

    @property
    def units(self) -> int | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "lengths",
            "path": str(self.path),
            "column": self.column,
            "content": "lengths",
            "tokenizer": None,
        }

    def batches(self) -> Iterator[RowBatch]:
        try:
            table = read_manifest(self.path, length_column=self.column or "length")
        except ManifestError as error:
            if self.path.suffix != ".txt":
                raise
            raise ManifestError(f"{error}; for texts name the folder that holds {self.path.name}") from error
        rows = {"id": np.arange(len(table)), "length": table.length_tokens}
        rows |= {name: values for name in FACTORS if (values := getattr(table, name)) is not None}
        yield RowBatch(rows=pa.record_batch(rows), done=len(table))
