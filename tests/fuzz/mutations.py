"""Changes a sound file into one that somebody might hand to fcp: by its values, its text, its columns or its bytes."""

from __future__ import annotations

import io
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fcp_cli.util.records import read_records, write_record

OPTION_WORDS = ("--all", "--user=root", "-A", "-rf", "--kubeconfig=/dev/null")
"""Texts that look like options of other programs: none may reach one as a word of its own."""
# What stands in place of a value, as it is written: of JSON and YAML alike.
_ODD_TEXTS = (
    *("null", "true", "-1", "0", "0.5", "-0.0", "1e999", "-1e999", "1e308", "1e-320", "NaN", "Infinity", "[]", "{}"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "4294967296", "1000000000000", "7" * 5000),
    *('""', '"x"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"/dev/null"', '"."', '"..%s{}"', '"fcp-plan/2"', '"é"'),
    *("[" * 3000 + "]" * 3000, '{"a":' * 200 + "1" + "}" * 200, "[1, [2, [3]]]", '[{"a": 1}]', '{"1": {"2": 3}}'),
    *map(
        json.dumps,
        (*OPTION_WORDS, "\x1b[2J\x1b]0;x\x07", "a\x00b", "../../../etc/passwd", "/dev/zero", "-", "~", "x" * 300),
    ),
    *map(
        json.dumps,
        ("{{ 7 * 7 }}", "$(id)", "2" * 20, "\u0661", "\u00b2", "1_000", " 4 ", "\u202e", "a/b", "..", "nan", "inf"),
    ),
    *(
        "1099511627776",
        "4194304",
        "2147483648",
        "-2147483649",
        "1" * 900,
        "99999999999999999999",
        "[[]]",
        "[null]",
        '["x"]',
        "[-1]",
    ),
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
    try:
        write_parquet(table, scratch, row_group_size=draw.choice((None, 1, 7)))
    except (pa.ArrowException, OSError):  # no Parquet has such a column
        return of_bytes(draw, content)
    return scratch.read_bytes()


def write_parquet(table: pa.Table, path: Path, *, row_group_size: int | None = None) -> None:
    """Write a table with its key-value pairs, and without the second copy of the schema."""
    pairs = {key.decode(): value.decode(errors="replace") for key, value in (table.schema.metadata or {}).items()}
    with pq.ParquetWriter(path, table.schema.remove_metadata(), store_schema=False) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata(pairs)


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
    if pa.types.is_nested(own.type) and draw.random() < 0.6:
        return _with_odd_cell(draw, values, own.type)
    if pa.types.is_integer(own.type) and draw.random() < 0.5:
        near = draw.choice((-2, -1, 1, 2))  # numbers that are nearly right get further than large ones
        at = draw.randrange(max(rows, 1))
        values = [value + near if i == at and value is not None else value for i, value in enumerate(values)]
        return _array(values, own.type)
    whole = (None, -1, 0, 2**31, 2**62, -(2**63), 2**63 - 1, 2**31 - 1, 2**20)
    odd = draw.choice((*whole, *(_NUMBERS if pa.types.is_floating(own.type) else ())))
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
        return draw.choice((*columns, *columns[-1:] * len(columns)))()
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([None] * rows, own.type)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([None] * len(values), kind)


_NUMBERS = (
    None,
    -1,
    0,
    1,
    2,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    -(2**63),
    2**63 - 1,
    1e308,
    -0.5,
    float("inf"),
    float("nan"),
)


def _with_odd_cell(draw: random.Random, values: list[Any], kind: pa.DataType) -> pa.Array:
    """Change one number within one row of lists, drop it, double it, or swap two."""
    found = [value for value in values if value]
    if found:
        cell = draw.choice(found)
        while isinstance(cell, dict) or (
            isinstance(cell, list) and cell and isinstance(draw.choice(cell), list | dict)
        ):
            cell = draw.choice(
                [inner for inner in (cell.values() if isinstance(cell, dict) else cell) if inner] or [[]]
            )
            if not isinstance(cell, list | dict):
                break
        if isinstance(cell, list):
            at = draw.randrange(len(cell) + 1)
            match draw.randrange(4):
                case 0:
                    del cell[at:]
                case 1:
                    cell[at:at] = cell[:1] * draw.choice((1, 1, 50))
                case 2:
                    draw.shuffle(cell)
                case _:
                    cell[at : at + 1] = [draw.choice(_NUMBERS)]
    return _array(values, kind)


def of_arrow(draw: random.Random, content: bytes) -> bytes:
    """Change the JSON in the schema, a column, or bytes of an Arrow stream or file."""
    if draw.random() < 0.4:
        return of_bytes(draw, content)
    is_file = content.startswith(b"ARROW1")
    with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.BufferReader(content)) as reader:
        table = reader.read_all()
    pairs = dict(table.schema.metadata or {})
    if pairs and draw.random() < 0.4:
        key = draw.choice(sorted(pairs))
        table = table.replace_schema_metadata({**pairs, key: of_json(draw, pairs[key])})
    elif table.num_columns:
        table = _with_odd_column(draw, table)
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=draw.choice((1, 7, 10_000)))
    written: bytes = sink.getvalue().to_pybytes()
    return written if draw.random() < 0.8 else written[: draw.randrange(len(written))]


def of_records(draw: random.Random, content: bytes) -> bytes:
    """Change a record of a journal, and more often than not give it the digest of what it then holds; or drop or double one."""
    if draw.random() < 0.2:
        return of_bytes(draw, content)
    with tempfile.NamedTemporaryFile() as scratch:
        Path(scratch.name).write_bytes(content)
        records = list(read_records(Path(scratch.name)))
    at = draw.randrange(len(records))
    match draw.randrange(8):
        case 0:
            del records[at]
        case 1:
            records.insert(at, draw.choice(records))
        case _:
            records[at] = (of_json if records[at].startswith(b"{") else of_arrow)(draw, records[at])
    written = io.BytesIO()
    for record in records:
        write_record(written, record)
    return written.getvalue()


def of_text(draw: random.Random, content: bytes) -> bytes:
    """Change a line or a word of a text, or bytes."""
    lines = content.split(b"\n")
    if draw.random() < 0.5:
        return of_bytes(draw, content)
    at = draw.randrange(len(lines))
    odd = draw.choice((*_ODD_TEXTS, *_ODD_YAML)).encode()
    words = lines[at].split(b" ")
    words[draw.randrange(len(words))] = odd
    lines[at : at + 1] = draw.choice(([b" ".join(words)], [], [lines[at]] * 3, [odd, lines[at]]))
    return b"\n".join(lines)


def of_tensors(draw: random.Random, content: bytes) -> bytes:
    """Change the JSON of a file of safetensors, its stated size, or bytes."""
    if draw.random() < 0.3:
        return of_bytes(draw, content)
    size = int.from_bytes(content[:8], "little")
    head, rows = content[8 : 8 + size], content[8 + size :]
    changed = of_json(draw, head)
    stated = draw.choice((len(changed), len(changed), len(changed), 0, 1, 2**40, 2**63, 2**64 - 1, size))
    return stated.to_bytes(8, "little") + changed + rows[: draw.choice((len(rows), len(rows), 0, len(rows) // 2))]


def of_tar(draw: random.Random, content: bytes) -> bytes:
    """Change a field of a member's header, with the checksum that fits it, or bytes."""
    if draw.random() < 0.3:
        return of_bytes(draw, content)
    changed = bytearray(content)
    headers = [at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"]
    at = draw.choice(headers)
    start, width, odd = draw.choice(_TAR_FIELDS)
    changed[at + start : at + start + width] = draw.choice(odd)[:width].ljust(width, b"\0")
    changed[at + 148 : at + 156] = b" " * 8
    changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    return bytes(changed)


_TAR_FIELDS: tuple[tuple[int, int, tuple[bytes, ...]], ...] = (
    (
        0,
        100,
        (
            b"",
            b"/etc/x.png",
            b"../../x.json",
            b"x" * 100,
            b"\xff\xfe.png",
            b"a.tar",
            b".png",
            b"x\x1b[2J.jpg",
            b"0000.mp4",
            b"0000.json",
        ),
    ),
    (
        124,
        12,
        (b"", b"77777777777", b"-1", b"0", b"00000000001", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"9" * 11, b"abc"),
    ),
    (156, 1, (b"0", b"1", b"2", b"3", b"5", b"L", b"K", b"x", b"g", b"S", b"\xff", b"V")),
    (345, 155, (b"..", b"/", b"\xff" * 20, b"p" * 155)),
    (257, 8, (b"ustar  \0", b"", b"ustar\x0000", b"\xff" * 8)),
)


_TEMPLATES = (
    '{{ lipsum.__globals__["os"].popen("id").read() }}',
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    '{{ "a" * 10**10 }}',
    "{% for a in range(10**5) %}{% for b in range(10**5) %}x{% endfor %}{% endfor %}",
    "{{ messages.append(messages) }}",
    "{{ messages.__setattr__('x', 1) }}",
    "{{ cycler.__init__.__globals__ }}",
    '{% include "/etc/passwd" %}',
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ raise_exception('no') }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ ('x' * 10**6) | center(10**9) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ range(10**9) | list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ strftime_now('%Y' * 10**8) }}",
    "{{ namespace(a=1).a }}",
    "{{ undefined_name.b.c }}",
    "{% generation %}x{% endgeneration %}",
    "{% set x = 'ab' %}{% for i in range(40) %}{% set x = x ~ x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 1 / 0 }}",
    "\x00\x1b[2J",
    "",
)


def of_template(draw: random.Random, content: bytes) -> bytes:
    """Put a hostile expression into a template, or change its text."""
    if draw.random() < 0.5:
        return of_text(draw, content)
    odd = draw.choice(_TEMPLATES).encode()
    at = draw.choice((0, len(content), draw.randrange(len(content) + 1)))
    return draw.choice((odd, content[:at] + odd + content[at:]))


def of_numbers(draw: random.Random, content: bytes) -> bytes:
    """Put an odd big- or little-endian number somewhere near the beginning, or at the end, as indices have them."""
    if draw.random() < 0.3:
        return of_bytes(draw, content)
    changed, width = bytearray(content), draw.choice((1, 2, 4, 8))
    at = draw.randrange(max(1, min(len(content), draw.choice((16, 64, 400, len(content)))) - width + 1))
    odd = draw.choice(
        (0, 1, 2, 2 ** (8 * width - 1), 2 ** (8 * width) - 1, 2 ** (8 * width - 1) - 1, draw.getrandbits(8 * width))
    )
    changed[at : at + width] = odd.to_bytes(width, draw.choice(("big", "little")))
    return bytes(changed)
