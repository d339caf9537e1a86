"""Lengths from a pipe: one JSON value per line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.checks import FACTORS, checked_table
from fcp_cli.manifest.table import LengthTable


def read_lengths_jsonl(stream: Iterable[str], *, length_column: str = "length") -> LengthTable:
    """Read one sequence per line: a whole number of tokens, or an object with `length` and the optional columns.

    Blank lines are skipped. A list, alone or under `length_column`, counts its items.

    Raises:
        ManifestError: a line is not JSON, has no length, or holds a value that no sequence can have.
    """
    # Arrays of numbers: a list would hold an object for each of the millions of lengths that a pipe may bring.
    lengths, etas = array("q"), array("d")
    vision = {name: array("q") for name in FACTORS if name != "eta"}
    for number, line in _lines(stream):
        record = _record(line, number, length_column)
        lengths.append(_whole(record[length_column], number, length_column))
        etas.append(_number(record.get("eta") or 0, number, "eta"))
        for name, column in vision.items():
            column.append(_whole(record.get(name) or 0, number, name))
    if not lengths:
        raise ManifestError('standard input has no lines: write one length per line, for example {"length": 4096}')
    factors: dict[str, FloatArray | IntArray] = {"eta": np.asarray(etas, np.float64)}
    factors |= {name: np.asarray(column, np.int64) for name, column in vision.items()}
    return checked_table("stdin", length_column, np.asarray(lengths, np.int64), factors)


def _lines(stream: Iterable[str]) -> Iterable[tuple[int, str]]:
    try:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line
    except UnicodeDecodeError as error:
        raise ManifestError("standard input is not UTF-8 text; write one JSON value per line") from error


def _record(line: str, number: int, length_column: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ManifestError(f"line {number} of standard input is not JSON: {line.strip()[:60]!r}") from error
    record = value if isinstance(value, dict) else {length_column: value}
    if length_column not in record:
        raise ManifestError(
            f"line {number} of standard input has no {length_column!r}; its keys are {', '.join(record)}; "
            "name one with --length-column"
        )
    return record


def _whole(value: Any, number: int, name: str) -> int:
    if isinstance(value, list):
        return len(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or abs(value) >= 2**63:
        raise ManifestError(f"line {number} of standard input: {name} is {value!r}, not a whole number of 64 bits")
    return int(value)


def _number(value: Any, number: int, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"line {number} of standard input: {name} is {value!r}, not a number")
    return float(value)
