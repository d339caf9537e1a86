"""Read lengths from text: one JSON value per line, from a pipe or a file."""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.table.checks import FACTORS, checked_table, length_column_of
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.reading.documents import decode_record
from fcp_cli.validation import shown

_STDIN: Final = "standard input"


def read_lengths_jsonl(
    stream: Iterable[str],
    *,
    length_column: str = "length",
    place: str = _STDIN,
    name: str = "stdin",
) -> LengthTable:
    """Read a sequence per line: a number of tokens, or an object with `length` and the optional columns.

    Blank lines are skipped. For a list, as the line or under `length_column`, the length is its number of items.

    Args:
        stream: the lines.
        length_column: key of the length; if the first object has no `length`, the default finds a usual name.
        place: source of the lines, for messages.
        name: the name of the table.
    """
    # Arrays of numbers: a list would hold an object for each of possibly millions of lengths.
    lengths, etas = array("q"), array("d")
    vision = {name: array("q") for name in FACTORS if name != "eta"}
    for number, line in _lines(stream, place):
        where = f"line {number} of {place}"
        record = _record(line, where, length_column)
        if not lengths:
            length_column = length_column_of(
                length_column, [key for key, value in record.items() if isinstance(value, int | list)]
            )
        if length_column not in record:
            raise ManifestError(_without_length(record, where, length_column, place))
        lengths.append(_whole(record[length_column], where, length_column))
        etas.append(_number(record.get("eta") or 0, where, "eta"))
        for factor, column in vision.items():
            column.append(_whole(record.get(factor) or 0, where, factor))
    if not lengths:
        raise ManifestError(
            f'{place} has no lines: write one length per line, for example {{"length": 4096}} '
            "(texts: `fcp manifest build`)"
        )
    factors: dict[str, FloatArray | IntArray] = {"eta": np.asarray(etas, np.float64)}
    factors |= {factor: np.asarray(column, np.int64) for factor, column in vision.items()}
    return checked_table(name, length_column, np.asarray(lengths, np.int64), factors)


def _lines(stream: Iterable[str], place: str) -> Iterable[tuple[int, str]]:
    try:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line
    except UnicodeDecodeError as error:
        raise ManifestError(f"{place} is not UTF-8 text; write one JSON value per line") from error


def _record(line: str, where: str, length_column: str) -> dict[str, Any]:
    try:
        value = decode_record(line)
    except ValueError as error:
        raise ManifestError(
            f"{where} is not JSON: {line.strip()[:60]!r}; write one length per line (texts: `fcp manifest build`)"
        ) from error
    return value if isinstance(value, dict) else {length_column: value}


def _without_length(record: dict[str, Any], where: str, length_column: str, place: str) -> str:
    missing = f"{where} has no {length_column!r}; its keys are {', '.join(record)}; name one with --length-column"
    if place == _STDIN or not any(isinstance(value, str | list) for value in record.values()):
        return missing
    build = shlex.join(["fcp", "manifest", "build", place, "-o", "lengths.parquet"])
    return f"{missing}, or count the tokens of texts with `{build}` (and --tokenizer)"


def _whole(value: Any, where: str, name: str) -> int:
    if isinstance(value, list):
        return len(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or abs(value) >= 2**63:
        raise ManifestError(f"{where}: {name} is {shown(value)}, not a whole number of 64 bits")
    return int(value)


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"{where}: {name} is {shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ManifestError(f"{where}: {name} is {shown(value)}, too large a number") from error
