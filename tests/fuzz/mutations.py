"""Changes a sound file into one that somebody might hand to fcp: by its values, its text, its columns or its bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

# What stands in place of a value, as it is written: of JSON and YAML alike.
_ODD_TEXTS = (
    *("null", "true", "-1", "0", "0.5", "-0.0", "1e999", "-1e999", "1e308", "1e-320", "NaN", "Infinity", "[]", "{}"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "4294967296", "1000000000000", "7" * 5000),
    *('""', '"x"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"/dev/null"', '"."', '"..%s{}"', '"fcp-plan/2"', '"é"'),
    *("[" * 3000 + "]" * 3000, '{"a":' * 200 + "1" + "}" * 200, "[1, [2, [3]]]", '[{"a": 1}]', '{"1": {"2": 3}}'),
    *(json.dumps("k" * 100_000), json.dumps(list(range(2000))), json.dumps({str(i): i for i in range(2000)})),
)
_ODD_YAML = (
    *("2001-13-45", "2001-01-01", "!!timestamp nope", "!!int abc", "!!float abc", "!!bool maybe", "!!binary x", ".nan"),
    *(".inf", "&a [*a]", "*nowhere", "!!python/object:os.system x", "0o777", "1:99:99", "~", "? x", "<<", "!!set {a}"),
    "[&a [x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c,*c,*c], [*d,*d,*d,*d,*d,*d]]",
)
_ODD_BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"{",
    b"]",
    b'"',
    b"\n",
    b"\r",
    b"\xef\xbb\xbf",
    b"-" * 50,
    b"9" * 40,
)
_MARK = "@@odd@@"


def of_bytes(draw: random.Random, content: bytes) -> bytes:
    """Flip, cut, double, insert or remove a few bytes."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 1, 4, 16, 200))
        match draw.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = draw.choice(_ODD_BYTES)
            case 4:
                changed[at:at] = changed[at : at + length]
            case _:
                changed[at : at + length] = draw.randbytes(min(length, len(changed) - at))
    return bytes(changed)


def of_values(draw: random.Random, document: Any, *, write: Callable[[Any], str], odd: tuple[str, ...] = ()) -> str:
    """Put something odd in the place of one or two values of a document, drop a key, or add one."""
    texts: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        places = list(_places(document, ()))
        if not places:
            break
        place = draw.choice(places)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        match draw.randrange(8):
            case 0:
                del holder[place[-1]]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("odd", "", "format", "a.b", "é", "k" * 3000))] = holder.pop(place[-1])
            case 2 if isinstance(holder, list):
                holder.extend(holder[:1] * draw.choice((1, 50)))
            case _:
                texts.append(draw.choice(_ODD_TEXTS + odd))
                holder[place[-1]] = f"{_MARK}{len(texts) - 1}"
    written = write(document)
    return re.sub(rf"""["']?{_MARK}(\d+)["']?""", lambda found: texts[int(found[1])], written)


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def of_json(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.25:
        return of_bytes(draw, content)
    if draw.random() < 0.1:
        return draw.choice(_ODD_TEXTS).encode()
    return of_values(draw, json.loads(content), write=json.dumps).encode()


def of_lines(draw: random.Random, content: bytes) -> bytes:
    """Change one line of JSON lines."""
    lines = content.splitlines()
    at = draw.choice((0, draw.randrange(len(lines))))
    lines[at] = of_json(draw, lines[at]).replace(b"\n", b" ")
    if draw.random() < 0.1:
        lines.insert(at, draw.choice(_ODD_TEXTS).encode())
    return b"\n".join(lines) + draw.choice((b"\n", b"", b"\n\n"))


def of_yaml(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.25:
        return of_bytes(draw, content)
    if draw.random() < 0.1:
        return draw.choice(_ODD_YAML + _ODD_TEXTS).encode()
    return of_values(draw, yaml.safe_load(content), write=yaml.safe_dump, odd=_ODD_YAML * 2).encode()


def of_parquet(draw: random.Random, content: bytes, scratch: Path) -> bytes:
    """Change the JSON in the footer, a column or its name, or bytes."""
    if draw.random() < 0.25:
        return of_bytes(draw, content)
    scratch.write_bytes(content)
    table = pq.read_table(scratch)
    pairs = dict(table.schema.metadata or {})
    if b"fcp" in pairs and draw.random() < 0.5:
        pairs[b"fcp"] = of_json(draw, pairs[b"fcp"])
        table = table.replace_schema_metadata(pairs)
    else:
        table = _with_odd_column(draw, table)
    pq.write_table(table, scratch, row_group_size=draw.choice((None, 1, 7)), store_schema=False)
    return scratch.read_bytes()


def _with_odd_column(draw: random.Random, table: pa.Table) -> pa.Table:
    at = draw.randrange(table.num_columns)
    name, rows = table.schema.names[at], table.num_rows
    match draw.randrange(8):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.append_column(name, table.column(at))
        case 2:
            return table.rename_columns(
                [draw.choice(("", "é", "x" * 2000, "a\nb")) if i == at else n for i, n in enumerate(table.schema.names)]
            )
        case 3:
            return table.slice(0, draw.choice((0, 1, rows // 2)))
        case 4:
            return table.take(pa.array(np.random.default_rng(draw.randrange(99)).permutation(rows)))
        case _:
            return table.set_column(at, name, _odd_column(draw, rows, table.column(at)))


def _odd_column(draw: random.Random, rows: int, own: pa.ChunkedArray) -> pa.Array:
    values = own.to_pylist()
    odd = draw.choice((None, -1, 0, 2**31, 2**62, -(2**63), 2**63 - 1))
    columns: tuple[Callable[[], pa.Array], ...] = (
        lambda: pa.array([2**64 - 1] * rows, pa.uint64()),
        lambda: pa.array([2**62 + 1] * rows, pa.timestamp("ns")),
        lambda: pa.array([1.5] * rows, pa.float64()),
        lambda: pa.array([float("nan")] * rows, pa.float64()),
        lambda: pa.array([None] * rows, pa.null()),
        lambda: pa.array(["x"] * rows),
        lambda: pa.array([b"\xff"] * rows),
        lambda: pa.array([{"a": 1}] * rows),
        lambda: pa.array([[[1]]] * rows),
        lambda: pa.array([[]] * rows, pa.list_(pa.int64())),
        lambda: pa.array([2**62] * rows, pa.duration("ns")),
        lambda: pa.array([2**31 - 1] * rows, pa.date32()),
        lambda: pa.array([odd if i == draw.randrange(max(rows, 1)) else v for i, v in enumerate(values)], own.type),
    )
    try:
        return draw.choice((*columns, columns[-1], columns[-1], columns[-1]))()
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([None] * rows, own.type)
