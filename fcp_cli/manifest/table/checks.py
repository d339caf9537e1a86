"""Validation of manifest rows from any source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.table.columns import chunked, new_column
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.words import counted

NULL: Final = int(np.iinfo(np.int64).min)  # stands for a null length until validation reports its row
LONGEST_TOKENS: Final = 2**31 - 1  # a plan holds lengths as int32
FACTORS: Final = ("eta", "vision_patches", "vision_patch_pairs")
USUAL_LENGTHS: Final = (
    *("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "seq_length"),
    *("input_ids", "tokens", "token_ids"),
)
"""Common names of columns with lengths or token ids, in order of preference."""


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of the list types."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def length_column_of(wanted: str, usable: Collection[str]) -> str:
    """Return the length column: `wanted`, or if that is the default and missing, a common name.

    Args:
        wanted: requested column; `length` is the default.
        usable: columns that hold whole numbers or lists.
    """
    if wanted != USUAL_LENGTHS[0]:
        return wanted
    return next((name for name in USUAL_LENGTHS if name in usable), wanted)


def empty_factors(rows: int, names: Collection[str] = FACTORS) -> dict[str, FloatArray | IntArray]:
    """Return a zero-filled column for each named factor."""
    return {name: new_column(rows, np.float64 if name == "eta" else np.int64) for name in names}


def checked_table(
    name: str, length_column: str, lengths: IntArray, factors: Mapping[str, FloatArray | IntArray]
) -> LengthTable:
    """Validate all values and return the table, without factors that are zero in all rows."""
    bad = np.concatenate(
        [first + np.flatnonzero((part <= 0) | (part > LONGEST_TOKENS)) for first, part in chunked(lengths)]
    )
    if len(bad):
        raise ManifestError(_bad_length(name, length_column, lengths, bad))
    for column, values in factors.items():
        _check_factor(name, column, values, *((-1, ">") if column == "eta" else (0, ">=")))
    # Dropping all-zero factors makes the content hash, and with it the plan, independent of whether they were given.
    kept: dict[str, Any] = {
        column: values if any(part.any() for _, part in chunked(values)) else None for column, values in factors.items()
    }
    return LengthTable(name=name, length_tokens=lengths, column=length_column, **kept)


def _check_factor(name: str, column: str, values: FloatArray | IntArray, least: int, relation: str) -> None:
    compare = np.greater if relation == ">" else np.greater_equal
    broken = np.concatenate(
        [first + np.flatnonzero(~(compare(part, least) & np.isfinite(part))) for first, part in chunked(values)]
    )
    if len(broken):
        row = int(broken[0])
        raise ManifestError(
            f"{name}: row {row} of column {column!r} is {values[row]}; it must be a finite number {relation} {least} "
            f"({_rows(len(broken))} in all)"
        )


def _bad_length(name: str, length_column: str, lengths: IntArray, bad: IntArray) -> str:
    row, value = int(bad[0]), int(lengths[bad[0]])
    shown = "null" if value == NULL else str(value)
    allowed = "lengths must be > 0 tokens" if value <= 0 else f"lengths must be at most {LONGEST_TOKENS} tokens"
    every = "all rows" if len(bad) == len(lengths) else f"{_rows(len(bad))} in all"
    return (
        f"{name}: row {row} of column {length_column!r} is {shown}; {allowed} ({every}); "
        "drop such rows or name another column with --length-column"
    )


def _rows(count: int) -> str:
    return counted(count, "such row")
