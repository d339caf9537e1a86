"""Documents that nobody should have written: each is refused in one short line with its place."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fcp_cli.errors import FcpError
from fcp_cli.util import inputs
from fcp_cli.util.inputs import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_YAML_BYTES,
    DamagedError,
    decode_json,
    decode_record,
    parse_yaml,
    read_json,
    read_object,
    read_records,
    read_text,
)
from tests import messages


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# Nine aliases of nine aliases, eleven times over: 9^12 values in half a kilobyte.
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MERGED = "\n".join(
    ["a0: &a0 {x: 1, y: 2}", *(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12))]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (nested(100_000), "it is nested more than 64 deep"),
        (nested(MOST_DEPTH + 2), "it is nested more than 64 deep"),
        ('{"a":' * 3000, "it is nested more than 64 deep"),
        ('{"a": [1, {"b": 1e999}]}', "a[1].b is inf; it must be a finite number"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("7" * 5000, "a number has thousands of digits"),
        ("7" * 400, "it is too large for a float"),
        ('{"a": "\\ud800"}', "a is a text that UTF-8 cannot hold"),
        ('{"\\ud800": 1}', "\\ud800 is a text that UTF-8 cannot hold"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_json_is_refused_with_the_place_and_the_reason(text: str, reason: str) -> None:
    with pytest.raises(DamagedError) as raised:
        decode_json(text)
    assert str(raised.value) == reason


def test_json_of_as_many_values_and_levels_as_are_allowed_is_read() -> None:
    assert decode_json(nested(MOST_DEPTH)) == json.loads(nested(MOST_DEPTH))
    with pytest.raises(DamagedError, match="it has too many values"):
        decode_json(json.dumps(list(range(100))), most_values=100)
    assert len(decode_json(json.dumps(list(range(99))), most_values=100)) == 99


def test_bytes_that_are_not_utf_8_are_no_json() -> None:
    with pytest.raises(DamagedError, match="it is not UTF-8 text"):
        decode_json(b'{"a": "\xff"}')


def test_records_of_data_may_hold_what_is_no_number_but_no_deep_nesting() -> None:
    assert decode_record('{"score": NaN, "length": 3}')["length"] == 3
    with pytest.raises(DamagedError, match="it is nested more than 64 deep"):
        decode_record(nested(500))
    brackets = json.dumps({"text": "[{" * 500})
    assert decode_record(brackets) == json.loads(brackets)  # in a text they nest nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!timestamp nope", "f is not valid YAML: 'nope' is no timestamp at line 1, column 4"),
        ("a: 1\nb: !!int abc", "f is not valid YAML: 'abc' is no int at line 2, column 4"),
        ("a: !!float abc", "f is not valid YAML: 'abc' is no float at line 1, column 4"),
        ("a: !!bool maybe", "f is not valid YAML: 'maybe' is no bool at line 1, column 4"),
        ("a: !!binary eA==", "f is not valid YAML: 'eA==' is no binary at line 1, column 4"),
        ("a: !!set {b}", "f is not valid YAML: there is no set here at line 1, column 4"),
        (f"a: {'7' * 5000}", f"f is not valid YAML: '{'7' * 40}' is no int at line 1, column 4"),
        ("a: !!python/object:os.x 1", "f is not valid YAML: '1' is no os.x at line 1, column 4"),
        ("a: &a [*a]", "f is not valid YAML: it is nested more than 64 deep"),
        (nested(600), "f is not valid YAML: it is nested more than 64 deep"),
        (BOMB, "f is not valid YAML: it has too many values"),
        ("a: {b: .nan}", "f: a.b is nan; it must be a finite number"),
        ('a: "\\ud800"', "f: a is a text that UTF-8 cannot hold"),
        ("x" * (MOST_YAML_BYTES + 1), "f is not valid YAML: it is larger than 512 KiB"),
    ],
)
def test_yaml_is_refused_with_the_place_and_the_reason(text: str, message: str) -> None:
    with messages.raises(f"FcpError: {message}"):
        parse_yaml(text, name="f", error=FcpError)


def test_mappings_that_are_merged_into_one_another_never_fill_the_memory() -> None:
    """PyYAML takes each key once from 6.0.4 on; before, they double with every level."""
    try:
        merged = parse_yaml(MERGED, name="f", error=FcpError)["a11"]
    except FcpError as refused:
        assert str(refused) == "f is not valid YAML: it has too many values at line 7, column 5"
    else:
        assert merged == {"x": 1, "y": 2}


def test_dates_stay_texts_and_numbers_are_those_of_yaml_1_2() -> None:
    text = "a: 2001-13-45\nb: 2001-01-31\nc: 50e9\nd: 0x10"
    assert parse_yaml(text, name="f", error=FcpError) == {"a": "2001-13-45", "b": "2001-01-31", "c": 50e9, "d": 16}


def test_an_alias_of_a_plain_block_is_read() -> None:
    text = "base: &base {ranks: 4}\nplan: {<<: *base, seed: 1}\nlist: [*base]"
    assert parse_yaml(text, name="f", error=FcpError)["plan"] == {"ranks": 4, "seed": 1}


_PIECES = ("a", "b: ", "c:", "- ", "\n", "\n  ", "{", "}", "[", "]", ", ", ",", ": ", "1.5", "'", '"', "&x ", "*x", "# ", "#", "<<: ",
           "!", "? ", "?", "|\n", ">", "\t", "\x85", "\r", "%", "@", "`", "~", "\\", "50e9", "--- ", "...")  # fmt: skip


@settings(max_examples=400)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=8))
@example(pieces=["!"])
@example(pieces=["c:", "\t", "1.5"])
@example(pieces=["[", "a", "?", "b: ", "]"])
@example(pieces=["|", "#"])
def test_libyaml_reads_a_text_as_pyyaml_itself_does(pieces: list[str]) -> None:
    def read() -> object:
        try:
            return parse_yaml("".join(pieces), name="f", error=FcpError)
        except FcpError as refused:
            return str(refused)

    quickly = read()
    with mock.patch.object(inputs, "_FastLoader", inputs._Loader):
        assert read() == quickly


def test_a_device_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    began = time.monotonic()
    with messages.raises("FcpError: cannot read the plan /dev/zero: it is not a regular file"):
        read_text(Path("/dev/zero"), error=FcpError, label="the plan ", most_bytes=1 << 22)
    assert time.monotonic() - began < 5.0
    assert MOST_BYTES <= 1 << 30


def test_what_a_file_holds_instead_is_named(tmp_path: Path) -> None:
    file = tmp_path / "document.json"
    file.write_text("[1]")
    with messages.raises("FcpError: FOLDER/document.json is not a JSON object but a list"):
        read_object(file, error=FcpError)
    with messages.raises("FcpError: FOLDER/document.json is not a list of records; one record per line is .jsonl"):
        read_records(file, error=FcpError)
    file.write_bytes(b"\xff")
    with messages.raises("FcpError: cannot read FOLDER/document.json: it is not UTF-8 text"):
        read_json(file, error=FcpError)
    with messages.raises("FcpError: cannot read the model nowhere.json: No such file or directory"):
        read_json(Path("nowhere.json"), error=FcpError, label="the model ")
