from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.read import read_lengths_jsonl, read_manifest, remarks
from fcp_cli.manifest.table import manifest_source
from tests.manifest.datasets import write_arrow, write_parquet
from tests.messages import raises

LENGTHS = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float64()])
def test_a_length_column_of_any_number_type_is_read_as_int64(tmp_path: Path, kind: Any) -> None:
    path = write_parquet(tmp_path / "m.parquet", {"length": pa.array([3, 1, 100], kind)})
    table = read_manifest(path)
    assert table.length_tokens.dtype == np.int64
    assert table.length_tokens.tolist() == [3, 1, 100]
    assert table.name == "m.parquet"


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_a_list_column_is_measured_by_its_list_lengths(tmp_path: Path, kind: Any) -> None:
    path = write_parquet(tmp_path / "m.parquet", {"input_ids": pa.array([[7], [1, 2, 3]], kind)})
    assert read_manifest(path, length_column="input_ids").length_tokens.tolist() == [1, 3]


def test_lists_of_one_fixed_size_are_measured_too(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "m.parquet", {"input_ids": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))})
    assert read_manifest(path, length_column="input_ids").length_tokens.tolist() == [2, 2]


@settings(max_examples=50)
@given(lengths=LENGTHS, group=st.integers(1, 7))
def test_row_groups_do_not_change_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], group: int
) -> None:
    path = tmp_path_factory.mktemp("m") / "m.parquet"
    write_parquet(path, {"length": lengths}, row_group_size=group)
    assert read_manifest(path).length_tokens.tolist() == lengths


def test_the_folder_of_a_sharded_data_set_is_read_in_name_order(tmp_path: Path) -> None:
    for name, length in (("b", 2), ("a", 1), ("c", 3)):
        write_parquet(tmp_path / f"{name}.parquet", {"length": [length]})
    assert read_manifest(tmp_path).length_tokens.tolist() == [1, 2, 3]


def test_the_file_layout_does_not_change_the_content_hash(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "one.parquet", {"length": pa.array([5, 6, 7], pa.int64())})
    other = write_parquet(tmp_path / "other.parquet", {"x": [1, 2, 3], "length": pa.array([5, 6, 7], pa.int32())})
    assert read_manifest(one).content_hash() == read_manifest(other).content_hash()


def test_work_factors_are_read_and_a_null_one_counts_as_zero(tmp_path: Path) -> None:
    columns = {
        "length": [10, 20],
        "eta": pa.array([0.5, None], pa.float32()),
        "vision_patches": pa.array([None, 256], pa.int32()),
        "vision_patch_pairs": [0, 65536],
    }
    table = read_manifest(write_parquet(tmp_path / "m.parquet", columns))
    assert table.eta is not None
    assert table.vision_patches is not None
    assert table.vision_patch_pairs is not None
    assert table.eta.tolist() == [0.5, 0.0]
    assert table.vision_patches.tolist() == [0, 256]
    assert table.vision_patch_pairs.tolist() == [0, 65536]


def test_a_factor_that_is_zero_throughout_is_left_out(tmp_path: Path) -> None:
    columns = {"length": [10, 20], "eta": [0.0, 0.0], "vision_patches": pa.nulls(2)}
    table = read_manifest(write_parquet(tmp_path / "m.parquet", columns))
    assert table.eta is None
    assert table.vision_patches is None


def test_rows_are_counted_across_the_shards_of_a_folder(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"length": [1, 2, 3]})
    write_parquet(tmp_path / "b.parquet", {"length": [4, -1]})
    with pytest.raises(ManifestError, match="row 4 of column 'length' is -1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("column", ["lengths", "num_tokens", "seq_len"])
def test_a_column_of_a_usual_name_is_found_and_named(tmp_path: Path, column: str) -> None:
    table = read_manifest(write_parquet(tmp_path / "m.parquet", {"id": ["x"], "input_ids": [[7]], column: [3]}))
    assert (table.column, table.length_tokens.tolist()) == (column, [3])


@pytest.mark.parametrize(
    ("name", "content", "lengths", "column"),
    [
        ("m.jsonl", '{"id": "a", "num_tokens": 5}\n{"id": "b", "num_tokens": 7}\n', [5, 7], "num_tokens"),
        ("m.jsonl", '{"input_ids": [1, 2]}\n', [2], "input_ids"),
        ("m.ndjson", "5\n\n7\n", [5, 7], "length"),
        ("m.txt", "5\n7\n", [5, 7], "length"),
        ("m.csv", "id,length,eta\na,5,0.5\nb,7,0\n", [5, 7], "length"),
        ("m.csv", "5\n7\n", [5, 7], "length"),
        ("m.csv", "id;length\na,b;5\nc;7\n", [5, 7], "length"),
        ("m.tsv", "name\ttoken_count\nx\t5\n", [5], "token_count"),
    ],
)
def test_lengths_as_text_are_read_as_they_are(
    tmp_path: Path, name: str, content: str, lengths: list[int], column: str
) -> None:
    (tmp_path / name).write_text(content)
    table = read_manifest(tmp_path / name)
    assert (table.name, table.column, table.length_tokens.tolist()) == (name, column, lengths)
    assert manifest_source(tmp_path / name) is None


def test_a_folder_that_datasets_saved_is_read_and_its_splits_are_named(tmp_path: Path) -> None:
    for split, lengths in (("test", [[1]]), ("train", [[1, 2], [3]])):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_arrow(tmp_path / "data" / split / "data-00000-of-00001.arrow", {"input_ids": lengths}, stream=True)
        (tmp_path / "data" / split / "state.json").write_text("{}")
    (tmp_path / "data" / "dataset_dict.json").write_text("{}")
    assert read_manifest(tmp_path / "data" / "train").length_tokens.tolist() == [2, 1]
    with raises(
        "ManifestError: FOLDER/data holds the splits test, train; name the folder of one: `fcp plan FOLDER/data/test` "
        "(texts and conversations: `fcp manifest build FOLDER/data/test` with --tokenizer)"
    ):
        read_manifest(tmp_path / "data")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_one_line(tmp_path: Path, kept: float) -> None:
    path = write_parquet(tmp_path / "m.parquet", {"length": list(range(1, 5000))})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ManifestError, match="cannot be read as Parquet") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


def test_damage_inside_a_row_group_is_one_line(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "m.parquet", {"length": list(range(1, 5000))})
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="cannot be read as Parquet") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


def parquet(columns: dict[str, Any], **header: str) -> Callable[[Path], Path]:
    """Writes `m.parquet` with these columns, and what its header says."""

    def write(folder: Path) -> Path:
        path = write_parquet(folder / "m.parquet", columns)
        if header:
            pq.write_table(pq.read_table(path).replace_schema_metadata({"fcp": json.dumps(header)}), path)
        return path

    return write


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


# What is wrong with a manifest -> what writes it.
REFUSED: dict[str, Callable[[Path], Path]] = {
    "lengths of 0": parquet({"length": [4, 0, 0]}),
    "a negative length": parquet({"length": [4, 5, -3]}),
    "a null": parquet({"length": [None, 5]}),
    "lengths of 0 alone": parquet({"length": [0, 0]}),
    "a length beyond 31 bits": parquet({"length": [1, 2**31]}),
    "a null among floats": parquet({"length": [1.0, None]}),
    "half a token": parquet({"length": [1.0, 2.5]}),
    "lengths as text": parquet({"length": ["12"]}),
    "no rows": parquet({"length": pa.array([], pa.int64())}),
    "a misspelt column": parquet({"id": ["x"], "lenght": [3]}),
    "other columns": parquet({"text": ["x"], "label": [1]}),
    "texts alone": parquet({"text": ["x"]}),
    "an eta below -1": parquet({"length": [1, 2], "eta": [0.0, -1.5]}),
    "an eta that is no number": parquet({"length": [1, 2], "eta": [float("nan"), 0.0]}),
    "negative patches": parquet({"length": [1, 2], "vision_patches": [-4, -4]}),
    "patch pairs as text": parquet({"length": [1, 2], "vision_patch_pairs": ["many", "few"]}),
    "eta as text": parquet({"length": [1, 2], "eta": ["causal", "full"]}),
    "a plan": parquet({"lengths": [[1]]}, format="fcp-plan/1"),
    "a later format": parquet({"length": [1]}, format="fcp-manifest/9"),
    "text named Parquet": text("m.parquet", "length\n3\n"),
    "no file": lambda folder: folder / "no.parquet",
    "no file of lines": lambda folder: folder / "no.jsonl",
    "records of texts": text("m.jsonl", '{"text": "a"}\n'),
    "a story": text("m.txt", "Once upon\n"),
    "an empty table": text("m.csv", ""),
    "a table of names": text("m.csv", "id\nx\n"),
}
REFUSALS = snapshot(
    {
        "lengths of 0": "m.parquet: row 1 of column 'length' is 0; lengths must be > 0 tokens (2 such rows in all); drop such rows or name another column with --length-column",
        "a negative length": "m.parquet: row 2 of column 'length' is -3; lengths must be > 0 tokens (1 such row in all); drop such rows or name another column with --length-column",
        "a null": "m.parquet: row 0 of column 'length' is null; lengths must be > 0 tokens (1 such row in all); drop such rows or name another column with --length-column",
        "lengths of 0 alone": "m.parquet: row 0 of column 'length' is 0; lengths must be > 0 tokens (all rows); drop such rows or name another column with --length-column",
        "a length beyond 31 bits": "m.parquet: row 1 of column 'length' is 2147483648; lengths must be at most 2147483647 tokens (1 such row in all); drop such rows or name another column with --length-column",
        "a null among floats": "m.parquet: row 1 of column 'length' is null; lengths must be > 0 tokens (1 such row in all); drop such rows or name another column with --length-column",
        "half a token": "m.parquet: row 1 of column 'length' is 2.5; lengths must be whole numbers of tokens; round them or name another column with --length-column",
        "lengths as text": "m.parquet: column 'length' is string, not a length; name an integer or list column with --length-column, or run `fcp manifest build` to count tokens",
        "no rows": "m.parquet has no rows: a manifest needs one row per sequence; see `fcp manifest build`",
        "a misspelt column": "m.parquet has no column 'length'; its columns are id, lenght; pass --length-column lenght",
        "other columns": "m.parquet has no column 'length'; its columns are text, label; name one with --length-column",
        "texts alone": "m.parquet has no column 'length'; its columns are text; count the tokens of texts with `fcp manifest build m.parquet -o lengths.parquet` (and --tokenizer)",
        "an eta below -1": "m.parquet: row 1 of column 'eta' is -1.5; it must be a finite number > -1 (1 such row in all)",
        "an eta that is no number": "m.parquet: row 0 of column 'eta' is nan; it must be a finite number > -1 (1 such row in all)",
        "negative patches": "m.parquet: row 0 of column 'vision_patches' is -4; it must be a finite number >= 0 (2 such rows in all)",
        "patch pairs as text": "m.parquet: column 'vision_patch_pairs' is string; it must be an integer",
        "eta as text": "m.parquet: column 'eta' is string; it must be a number",
        "a plan": "m.parquet is a plan, not a length manifest; 'fcp inspect m.parquet' shows it",
        "a later format": "m.parquet has the format 'fcp-manifest/9'; this version of fcp reads 'fcp-manifest/1'",
        "text named Parquet": "m.parquet is text, not a length manifest; 'fcp manifest build m.parquet' makes one of a data set",
        "no file": "no.parquet does not exist; `fcp manifest build SOURCE -o no.parquet` makes a manifest",
        "no file of lines": "no.jsonl does not exist; `fcp manifest build SOURCE -o no.parquet` makes a manifest",
        "records of texts": "line 1 of m.jsonl has no 'length'; its keys are text; name one with --length-column, or count the tokens of texts with `fcp manifest build m.jsonl -o lengths.parquet` (and --tokenizer)",
        "a story": "line 1 of m.txt is not JSON: 'Once upon'; write one length per line (texts: `fcp manifest build`)",
        "an empty table": "m.csv cannot be read as CSV (Empty CSV file): truncated, damaged or another format; copy or make it again",
        "a table of names": "m.csv has no column 'length'; its columns are id; write texts as JSON lines, and count their tokens with `fcp manifest build`",
    }
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(REFUSED[case](tmp_path))
    assert str(caught.value).replace(f"{tmp_path}/", "") == REFUSALS[case]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("datset.parquet", "datset.parquet does not exist; did you mean 'dataset.parquet'?"),
        ("dataset.jsonl", "did you mean 'dataset.parquet'?"),
        ("none*.parquet", "-o MANIFEST`"),
    ],
)
def test_a_missing_manifest_is_named_with_the_file_that_was_meant_or_how_to_build_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "dataset.parquet", {"length": [1]})
    with pytest.raises(ManifestError) as caught:
        read_manifest(typed)
    assert said in str(caught.value)


def test_a_glob_is_the_manifest_of_all_files_that_it_matches_by_name(tmp_path: Path) -> None:
    for name, length in (("b", 2), ("a", 1), ("c", 3)):
        write_parquet(tmp_path / f"{name}.parquet", {"length": [length]})
    assert read_manifest(tmp_path / "[ab].parquet").length_tokens.tolist() == [1, 2]
    assert manifest_source(tmp_path / "*.parquet") is None


def test_texts_are_built_into_a_manifest_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lengths", "lengths-2", "m"):
        write_parquet(tmp_path / f"{name}.parquet", {"text": ["a"]})
    with pytest.raises(ManifestError, match=r"fcp manifest build m\.parquet -o lengths-3\.parquet"):
        read_manifest("m.parquet")


def test_equal_lengths_are_a_remark_and_no_error(tmp_path: Path) -> None:
    table = read_manifest(write_parquet(tmp_path / "m.parquet", {"length": [4096, 4096, 4096]}))
    assert remarks(table) == snapshot(
        ["m.parquet: all 3 sequences have 4096 tokens; were they packed or padded already?"]
    )
    assert remarks(read_manifest(write_parquet(tmp_path / "n.parquet", {"length": [1, 2]}))) == []


@settings(max_examples=50)
@given(lengths=LENGTHS)
def test_json_lines_of_numbers_and_of_objects_read_alike(lengths: list[int]) -> None:
    numbers = read_lengths_jsonl(io.StringIO("\n".join(map(str, lengths))))
    objects = read_lengths_jsonl(io.StringIO("".join(f'{{"id": 1, "length": {length}}}\n\n' for length in lengths)))
    assert numbers.length_tokens.tolist() == objects.length_tokens.tolist() == lengths
    assert numbers.content_hash() == objects.content_hash()


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"input_ids": [1, 2, 3], "eta": 1, "vision_patches": 4}\n'))
    )
    table = read_manifest("-", length_column="input_ids")
    assert table.name == "stdin"
    assert table.length_tokens.tolist() == [3]
    assert table.eta is not None
    assert table.vision_patches is not None
    assert (table.eta.tolist(), table.vision_patches.tolist()) == ([1.0], [4])


LINES: dict[str, str] = {
    "nothing": "",
    "a word": "3\nhello\n",
    "an object without a length": '{"token": 3}',
    "half a token": "2.5",
    "no number": "NaN",
    "a truth value": "true",
    "a number as text": '"3"',
    "a number beyond 64 bits": "99999999999999999999",
    "a negative length": "5\n-1",
    "an eta of -1": '{"length": 5, "eta": -1}',
    "an eta as text": '{"length": 5, "eta": "x"}',
}
LINES_MESSAGES = snapshot(
    {
        "nothing": 'ManifestError: standard input has no lines: write one length per line, for example {"length": 4096} (texts: `fcp manifest build`)',
        "a word": "ManifestError: line 2 of standard input is not JSON: 'hello'; write one length per line (texts: `fcp manifest build`)",
        "an object without a length": "ManifestError: line 1 of standard input has no 'length'; its keys are token; name one with --length-column",
        "half a token": "ManifestError: line 1 of standard input: length is 2.5, not a whole number of 64 bits",
        "no number": "ManifestError: line 1 of standard input: length is nan, not a whole number of 64 bits",
        "a truth value": "ManifestError: line 1 of standard input: length is True, not a whole number of 64 bits",
        "a number as text": "ManifestError: line 1 of standard input: length is '3', not a whole number of 64 bits",
        "a number beyond 64 bits": "ManifestError: line 1 of standard input: length is 99999999999999999999, not a whole number of 64 bits",
        "a negative length": "ManifestError: stdin: row 1 of column 'length' is -1; lengths must be > 0 tokens (1 such row in all); drop such rows or name another column with --length-column",
        "an eta of -1": "ManifestError: stdin: row 0 of column 'eta' is -1.0; it must be a finite number > -1 (1 such row in all)",
        "an eta as text": "ManifestError: line 1 of standard input: eta is 'x', not a number",
    }
)


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_of_standard_input_is_named(case: str) -> None:
    with raises(LINES_MESSAGES[case]):
        read_lengths_jsonl(io.StringIO(LINES[case]))


def test_standard_input_that_is_not_text_is_one_line() -> None:
    with pytest.raises(ManifestError, match="standard input is not UTF-8 text"):
        read_lengths_jsonl(io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8"))


def test_an_eta_of_64_bits_without_a_sign_is_a_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"length": [5, 6], "eta": pa.array([2**63 + 5, 0], pa.uint64())})
    table = read_manifest(path)
    assert table.eta is not None and table.eta.tolist() == [float(2**63), 0.0]


def test_an_arrow_file_whose_offsets_leave_its_values_is_refused(tmp_path: Path) -> None:
    offsets = pa.py_buffer(np.array([0, 2**30, 2], np.int32).tobytes())
    lists = pa.Array.from_buffers(pa.list_(pa.int32()), 2, [None, offsets], children=[pa.array([1, 2], pa.int32())])
    table = pa.table({"input_ids": lists})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ManifestError, match=r"a\.arrow cannot be read as Arrow"):
        read_manifest(tmp_path / "a.arrow", length_column="input_ids")
