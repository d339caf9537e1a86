"""Every kind of source: what is built is read back, and the tokens behind it are the ones that went in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest import columnar
from fcp_cli.manifest import tokenizer as tokenizer_module
from fcp_cli.manifest.columnar import ParquetShard
from fcp_cli.manifest.detect import detect_kind
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import manifest_source
from fcp_cli.manifest.tokenizer import FileTokenizer
from fcp_cli.manifest.tokens import SyntheticTokens, open_tokens
from tests.manifest.datasets import (
    build,
    tokens_at,
    write_arrow,
    write_jsonl,
    write_megatron,
    write_parquet,
    write_tokenizer,
    write_tree,
)
from tests.messages import raises

TOKEN_LISTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=20).filter(any)
TEXTS = st.lists(st.text(max_size=20), min_size=1, max_size=20).filter(any)


def tokens_of(manifest: Path) -> list[list[int]]:
    """Every sequence of a manifest through its token reader."""
    reader = open_tokens(manifest)
    rows = len(read_manifest(manifest))
    sequences = [tokens_at(reader, row) for row in range(rows)]
    assert all(sequence.dtype == np.int64 for sequence in sequences)
    assert max(max(sequence) for sequence in sequences) < reader.vocab_size
    return [sequence.tolist() for sequence in sequences]


def utf8(texts: list[str]) -> list[list[int]]:
    """Byte tokens of the texts that have any."""
    return [list(text.encode("utf-8", "surrogatepass")) for text in texts if text]


WRITERS: dict[str, Callable[[Path, list[list[int]]], Path]] = {
    "jsonl": lambda root, rows: write_jsonl(root / "d.jsonl", [{"input_ids": row, "x": "y"} for row in rows]),
    "parquet": lambda root, rows: write_parquet(
        root / "d.parquet", {"input_ids": pa.array(rows, pa.list_(pa.int32()))}, row_group_size=3
    ),
    "arrow stream": lambda root, rows: write_arrow(
        root / "d.arrow", {"input_ids": pa.array(rows, pa.large_list(pa.int64()))}, stream=True
    ),
    "arrow file": lambda root, rows: write_arrow(
        root / "d.feather", {"input_ids": pa.array(rows, pa.list_(pa.int64()))}, stream=False
    ),
    "megatron": lambda root, rows: write_megatron(root / "d", [np.array(row, np.int32) for row in rows]),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", sorted(WRITERS))
@settings(max_examples=25)
@given(rows=TOKEN_LISTS)
def test_token_ids_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rows: list[list[int]]
) -> None:
    root = tmp_path_factory.mktemp("d")
    column = "input_ids" if kind == "jsonl" else None
    built = build(WRITERS[kind](root, rows), root / "m.parquet", column=column)
    kept = [row for row in rows if row]
    assert tokens_of(root / "m.parquet") == kept
    assert built.rows == len(kept)
    assert built.skipped == ({"empty": len(rows) - len(kept)} if len(kept) < len(rows) else {})
    assert read_manifest(root / "m.parquet").length_tokens.tolist() == [len(row) for row in kept]


@settings(max_examples=50)
@given(texts=TEXTS)
def test_texts_of_json_lines_and_parquet_are_their_utf8_bytes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    root = tmp_path_factory.mktemp("d")
    build(write_jsonl(root / "d.jsonl", [{"text": text} for text in texts]), root / "j.parquet")
    build(write_parquet(root / "d.parquet", {"text": texts}, row_group_size=2), root / "p.parquet")
    assert tokens_of(root / "j.parquet") == tokens_of(root / "p.parquet") == utf8(texts)


def test_a_text_tree_is_read_in_name_order_without_hidden_empty_and_binary_files(tmp_path: Path) -> None:
    files = {
        "b/x.py": b"bx",
        "a.py": "ä".encode(),
        "b/.hidden/x.py": b"no",
        ".git/x.py": b"no",
        "c.py": b"",
        "d.py": b"no\0text",
        "b.py": b"b",
    }
    built = build(write_tree(tmp_path / "tree", files), tmp_path / "m.parquet")
    assert built.skipped == {"binary": 1, "empty": 1}
    assert pq.read_table(tmp_path / "m.parquet").column("id").to_pylist() == ["a.py", "b/x.py", "b.py"]
    assert tokens_of(tmp_path / "m.parquet") == [list("ä".encode()), list(b"bx"), list(b"b")]


def test_globs_choose_files_by_name_or_by_path(tmp_path: Path) -> None:
    names = ["a.py", "a.txt", "test/a.py", "lib/test/a.py", "lib/a.py", "lib/b.md"]
    tree = write_tree(tmp_path / "tree", dict.fromkeys(names, b"x"))

    def ids(**globs: Any) -> list[str]:
        build(tree, tmp_path / "m.parquet", **globs)
        found: list[str] = pq.read_table(tmp_path / "m.parquet").column("id").to_pylist()
        return found

    assert ids(include=("*.py",)) == ["a.py", "lib/a.py", "lib/test/a.py", "test/a.py"]
    assert ids(include=("*.py", "*.md"), exclude=("test",)) == ["a.py", "lib/a.py", "lib/b.md"]
    assert ids(include=("lib/*",), exclude=("lib/test",)) == ["lib/a.py", "lib/b.md"]


def test_a_text_tree_leaves_out_its_own_manifest(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    assert [build(tree, tree / "lengths.md", kind="text").rows for _ in range(2)] == [1, 1]


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    (tree / "b.txt").symlink_to(tree / "a.txt")
    (tree / "loop").symlink_to(tree)
    (tree / "gone.txt").symlink_to(tree / "nothing")
    assert build(tree, tmp_path / "m.parquet").rows == 2


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_tokenizer_file_counts_and_encodes_alike_in_every_source_of_text(tmp_path: Path, kind: str) -> None:
    texts = ["a b c", "", "a x\ud800", "e d c b a"]
    sources = {
        "text": lambda: write_tree(
            tmp_path / "t", {f"{i}.txt": text.encode("utf-8", "surrogatepass") for i, text in enumerate(texts)}
        ),
        "jsonl": lambda: write_jsonl(tmp_path / "d.jsonl", [{"text": text} for text in texts]),
        "parquet": lambda: write_parquet(
            tmp_path / "d.parquet", {"text": pa.array([text.encode("utf-8", "surrogatepass") for text in texts])}
        ),
    }
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    built = build(sources[kind](), tmp_path / "m.parquet", tokenizer=str(tokenizer))
    assert built.skipped == {"empty": 1}
    assert tokens_of(tmp_path / "m.parquet")[0] == [9, 1, 2, 3]  # neither cut to 2 nor without its [CLS]
    assert tokens_of(tmp_path / "m.parquet")[-1] == [9, 5, 4, 3, 2, 1]
    assert open_tokens(tmp_path / "m.parquet").vocab_size == 10
    source = manifest_source(tmp_path / "m.parquet")
    assert source is not None
    assert source["tokenizer"] == str(tokenizer)


def test_a_folder_of_shards_is_one_data_set(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet", "arrow"):
        root = tmp_path / kind
        root.mkdir()
        for name, rows in (("b", [[3], [4, 4]]), ("a", [[1], [], [2, 2]])):
            if kind == "jsonl":
                write_jsonl(root / f"{name}.jsonl", [{"input_ids": row} for row in rows])
            elif kind == "parquet":
                write_parquet(root / f"{name}.parquet", {"input_ids": rows}, row_group_size=1)
            else:
                write_arrow(root / f"{name}.arrow", {"input_ids": rows}, stream=True)
        assert detect_kind(root) == kind
        build(root, tmp_path / "m.parquet", column="input_ids")
        assert tokens_of(tmp_path / "m.parquet") == [[1], [2, 2], [3], [4, 4]]
        assert pq.read_table(tmp_path / "m.parquet").column("id").to_pylist() == [0, 2, 3, 4]


def test_a_column_of_lengths_goes_along_with_its_work_factors(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "d.parquet", {"num_tokens": [3, 0, 5], "eta": [0.5, 0.0, 1.0], "note": ["x"] * 3})
    build(source, tmp_path / "m.parquet")
    table = read_manifest(tmp_path / "m.parquet")
    assert table.length_tokens.tolist() == [3, 5]
    assert table.eta is not None
    assert table.eta.tolist() == [0.5, 1.0]
    with pytest.raises(ManifestError, match="holds no tokens; train on synthetic tokens"):
        open_tokens(tmp_path / "m.parquet")


def test_megatron_lengths_need_the_index_alone_and_tokens_need_the_bin(tmp_path: Path) -> None:
    sequences = [np.arange(count, dtype=np.uint16) + 60_000 for count in (3, 1, 7)]
    build(write_megatron(tmp_path / "d", sequences, with_bin=False), tmp_path / "m.parquet")
    assert read_manifest(tmp_path / "m.parquet").length_tokens.tolist() == [3, 1, 7]
    with raises(
        snapshot(
            "ManifestError: cannot read FOLDER/d.bin, which holds the tokens of FOLDER/d.idx: No such file or directory"
        )
    ):
        open_tokens(tmp_path / "m.parquet")
    write_megatron(tmp_path / "d", sequences)
    assert tokens_of(tmp_path / "m.parquet") == [sequence.tolist() for sequence in sequences]
    assert open_tokens(tmp_path / "m.parquet").vocab_size == 60_007


def test_the_megatron_vocabulary_is_read_once_or_taken_as_given(tmp_path: Path) -> None:
    index = write_megatron(tmp_path / "d", [np.array([7, 11], np.uint16), np.array([300], np.uint16)])
    for vocab_size, expected in ((None, 301), (512, 512)):
        build(index, tmp_path / "m.parquet", vocab_size=vocab_size)
        source = manifest_source(tmp_path / "m.parquet")
        assert source is not None
        assert source["vocab_size"] == open_tokens(tmp_path / "m.parquet").vocab_size == expected


def test_a_truncated_megatron_bin_is_named_while_building(tmp_path: Path) -> None:
    index = write_megatron(tmp_path / "d", [np.array([7, 11], np.int32), np.array([300], np.int32)])
    index.with_suffix(".bin").write_bytes(bytes(8))
    with raises(snapshot("ManifestError: FOLDER/d.bin is truncated: sequence 1 ends at token 3 of 2")):
        build(index, tmp_path / "m.parquet")


@pytest.mark.parametrize("typed", ["d", "d.bin", "d.idx"])
def test_megatron_data_is_known_by_its_prefix_or_either_file(tmp_path: Path, typed: str) -> None:
    write_megatron(tmp_path / "d", [np.array([1, 2], np.int32)])
    build(tmp_path / typed, tmp_path / "m.parquet")
    assert tokens_of(tmp_path / "m.parquet") == [[1, 2]]


def test_a_data_set_that_is_planned_as_it_is_is_its_own_source(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", {"input_ids": [[1, 2], [70]]}, row_group_size=1)
    reader = open_tokens(path, length_column="input_ids")
    assert [tokens_at(reader, row).tolist() for row in (1, 0)] == [[70], [1, 2]]
    assert reader.vocab_size == 71


def test_a_foreign_manifest_of_lengths_says_that_it_has_no_tokens(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", {"length": [1, 2]})
    with pytest.raises(ManifestError, match="does not record where its tokens are"):
        open_tokens(path)


def test_a_source_that_moved_is_found_where_the_caller_says(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    build(tree, tmp_path / "m.parquet")
    tree.rename(tmp_path / "moved")
    with pytest.raises(ManifestError, match=re.escape(f"was built from {tree}, which is gone")):
        open_tokens(tmp_path / "m.parquet")
    assert tokens_at(open_tokens(tmp_path / "m.parquet", source=tmp_path / "moved"), 0).tolist() == list(b"abc")


def test_a_sequence_that_changed_is_named_with_the_command_that_rebuilds(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a b.py": b"abc"})
    build(tree, tmp_path / "m.parquet", include=("*.py",))
    (tree / "a b.py").write_bytes(b"abcd")
    with pytest.raises(ManifestError) as caught:
        open_tokens(tmp_path / "m.parquet")(0)
    assert str(caught.value) == (
        f"{tree}/a b.py changed since the manifest was built: it has 4 tokens, but row 0 of the manifest has 3; build and "
        f"plan again: fcp manifest build {tree} --kind text --include '*.py' -o {tmp_path}/m.parquet, then fcp plan "
        f"{tmp_path}/m.parquet"
    )


@pytest.mark.parametrize(
    ("edited", "place", "found"),
    [(b'{"text": "longer"}\n{"text": "de"}\n', " at byte 16", b'"}'), (b'{"text": "abc"}\n', ":2", b"")],
    ids=["a longer row", "a row less"],
)
def test_a_file_of_lines_that_changed_is_named_as_such_and_not_as_bad_json(
    edited: bytes, place: str, found: bytes, tmp_path: Path
) -> None:
    write_tree(tmp_path, {"d.jsonl": b'{"text": "abc"}\n{"text": "de"}\n'})
    build(tmp_path / "d.jsonl", tmp_path / "m.parquet")
    (tmp_path / "d.jsonl").write_bytes(edited)
    with pytest.raises(ManifestError) as caught:
        open_tokens(tmp_path / "m.parquet")(1)
    assert str(caught.value) == (
        f"the data changed since the manifest was built, so its row 1 cannot be read: {tmp_path}/d.jsonl{place} is not "
        f"JSON: {found!r}; build and plan again: fcp manifest build {tmp_path}/d.jsonl --kind jsonl --column text -o "
        f"{tmp_path}/m.parquet, then fcp plan {tmp_path}/m.parquet"
    )


def test_a_file_that_cannot_be_read_is_not_said_to_have_changed(tmp_path: Path) -> None:
    write_tree(tmp_path, {"d.jsonl": b'{"text": "abc"}\n'})
    build(tmp_path / "d.jsonl", tmp_path / "m.parquet")
    reader = open_tokens(tmp_path / "m.parquet")
    (tmp_path / "d.jsonl").unlink()
    with pytest.raises(ManifestError, match=f"^cannot read {tmp_path}/d.jsonl"):
        reader(0)


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_a_source_that_was_rewritten_is_an_error_in_every_kind(tmp_path: Path, kind: str) -> None:
    column = "input_ids" if kind == "jsonl" else None
    build(WRITERS[kind](tmp_path, [[1, 2], [3, 4, 5]]), tmp_path / "m.parquet", column=column)
    WRITERS[kind](tmp_path, [[1, 2, 3]])
    reader = open_tokens(tmp_path / "m.parquet")
    for row in (0, 1):
        with pytest.raises(ManifestError) as caught:
            reader(row)
        assert str(tmp_path / "d") in str(caught.value)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    build(tree, tmp_path / "m.parquet")
    reader = open_tokens(tmp_path / "m.parquet")
    (tree / "a.txt").unlink()
    with pytest.raises(ManifestError, match=r"cannot read .*a\.txt: No such file or directory"):
        reader(0)


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_threads_may_read_at_once(tmp_path: Path, kind: str) -> None:
    rows = [[row] * (1 + row % 7) for row in range(200)]
    column = "input_ids" if kind == "jsonl" else None
    build(WRITERS[kind](tmp_path, rows), tmp_path / "m.parquet", column=column)
    reader = open_tokens(tmp_path / "m.parquet")
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(200), 3))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: tokens_at(reader, row), order))
    assert [tokens.tolist() for tokens in found] == [rows[row] for row in order]


def test_a_reader_keeps_a_bounded_number_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_CACHE_BYTES", 2000)
    rows = [[row] * 100 for row in range(50)]
    source = write_parquet(tmp_path / "d.parquet", {"input_ids": rows}, row_group_size=1)
    build(source, tmp_path / "m.parquet")
    reads: list[int] = []
    original = ParquetShard.read_group

    def counted(self: ParquetShard, group: int, column: str) -> Any:
        reads.append(group)
        return original(self, group, column)

    monkeypatch.setattr(ParquetShard, "read_group", counted)
    reader: Any = open_tokens(tmp_path / "m.parquet")
    assert [reader(row)[0] for row in (0, 1, 1, 0, *range(50), 0)] == [0, 1, 1, 0, *range(50), 0]
    assert reads == [*range(50), 0]


Writer = Callable[[Path], Path]


def raw(name: str, content: bytes) -> Writer:
    return lambda root: write_tree(root, {name: content}) / name


def lines(*records: Any) -> Writer:
    return lambda root: write_jsonl(root / "d.jsonl", list(records))


def parquet(**columns: list[Any]) -> Writer:
    return lambda root: write_parquet(root / "d.parquet", columns)


HEADER = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
# What is wrong with a source -> what writes it, the column that is named, and the beginning of the message.
BAD: dict[str, tuple[Writer, str | None, str]] = {
    "nothing there": (lambda root: root / "nothing", None, "there is no source nothing"),
    "an unknown suffix": (raw("d.xyz", b"x"), None, "cannot recognize the kind of d.xyz by its name; choose with"),
    "empty files alone": (
        lambda root: write_tree(root / "t", {"a": b""}),
        None,
        "t holds no sequence with tokens; 1 skipped as empty",
    ),
    "lines of other fields": (lines({"a": 1, "b": 2}), None, "d.jsonl:1 has no field 'text'; its fields are a"),
    "a number": (lines({"text": "x"}, {"text": 7}), None, "d.jsonl:2: field 'text' holds neither"),
    "lists of one token": (lines({"text": [[1], [2]]}), None, "d.jsonl:1: field 'text' holds neither a text"),
    "ragged lists": (lines({"text": [[1], [2, 3]]}), None, "d.jsonl:1: field 'text' holds neither a text"),
    "a null token": (lines({"text": [1, None]}), None, "d.jsonl:1: field 'text' holds neither a text"),
    "lines of lists": (lines([1]), None, "d.jsonl:1 is not a JSON object but a list"),
    "a line that is no JSON": (raw("d.jsonl", b'{"text": "x"'), None, 'd.jsonl:1 is not JSON: b\'{"text"'),
    "a damaged Parquet file": (raw("d.parquet", b"PAR1"), None, "d.parquet cannot be read as Parquet"),
    "a damaged Arrow file": (raw("d.arrow", b"nonsense"), None, "d.arrow cannot be read as Arrow"),
    "no column of a usual name": (parquet(a=[1], b=[2]), None, "d.parquet has no column of a usual name"),
    "another column than is named": (parquet(a=[1]), "c", "d.parquet has no column 'c'; its columns are a; name"),
    "fractions": (parquet(a=[1.5]), "a", "d.parquet: column 'a' is double; it must hold lists"),
    "lists of texts": (parquet(a=[["x"]]), "a", "d.parquet: column 'a' is list<element: string>"),
    "a null token of a column": (parquet(a=[[1, None]]), "a", "d.parquet: column 'a' holds 1 null tokens"),
    "a negative length": (
        parquet(a=[3, -2]),
        "a",
        "d.parquet: row 1 of column 'a' is -2; a length is at least 0; correct or drop that row",
    ),
    "a length beyond a plan's": (parquet(a=[2**40]), "a", "sequence 0 has 1099511627776 tokens; a plan holds 1 to"),
    "another file with an index's name": (
        raw("d.idx", b"something else"),
        None,
        "d.idx is not a Megatron index: it does not start with MMIDIDX",
    ),
    "the head of an index": (raw("d.idx", HEADER), None, "d.idx is not a Megatron index"),
    "an unknown type of tokens": (
        raw("d.idx", HEADER + b"\x07" + bytes(16)),
        None,
        "d.idx has index version 1 and token type 7",
    ),
    "an index cut short": (
        raw("d.idx", HEADER + b"\x04" + b"\x09" + bytes(15)),
        None,
        "d.idx is truncated: 34 bytes, but 9 sequences need",
    ),
    "an index of nothing": (
        raw("d.idx", HEADER + b"\x04" + bytes(16)),
        None,
        "d.idx holds no sequence with tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_source_is_one_line_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    write, column, message = BAD[case]
    source = write(tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(ManifestError) as caught:
        build(source, tmp_path / "m.parquet", column=column)
    assert message in str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) == before


def test_shards_that_differ_are_named(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write_parquet(tmp_path / "d" / "a.parquet", {"input_ids": [[1]]})
    write_parquet(tmp_path / "d" / "b.parquet", {"text": ["x"]})
    with raises(snapshot("ManifestError: FOLDER/d/b.parquet has no column 'input_ids' of tokens, unlike a.parquet")):
        build(tmp_path / "d", tmp_path / "m.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no tokenizer"), (b"{}", "is not a tokenizer.json"), (b"\xff", "is not a tokenizer.json")],
)
def test_a_bad_tokenizer_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ManifestError, match=message) as caught:
        build(tree, tmp_path / "m.parquet", tokenizer=str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_over_which_the_library_panics_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    document = json.loads(file.read_text())
    document["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(document))
    with raises(
        snapshot(
            "ManifestError: FOLDER/tokenizer.json cannot encode a text of 4 characters: it gives up with 'no entry found for key'; is it damaged?"
        )
    ):
        FileTokenizer(file)
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_does_not_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, never = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json")), Event()
    monkeypatch.setattr(tokenizer, "_tokenizer", SimpleNamespace(encode_batch_fast=lambda texts: never.wait(10)))
    monkeypatch.setattr(tokenizer_module, "_LEAST_SECONDS", 0.05)
    try:
        with raises(
            snapshot(
                "ManifestError: FOLDER/tokenizer.json cannot encode a text of 1 character: it took more than 0.1 s; is it damaged?"
            )
        ):
            tokenizer.count(pa.array(["a"]))
    finally:
        never.set()


def growing(file: Path, **fields: Any) -> FileTokenizer:
    """A tokenizer of single characters, with a normalizer or post-processor that makes more of them."""
    document = json.loads(write_tokenizer(file).read_text()) | {"post_processor": None, "pre_tokenizer": None}
    document["model"] = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
    file.write_text(json.dumps(document | {"added_tokens": []} | fields))
    return FileTokenizer(file)


@pytest.mark.parametrize("limit", ["time", "memory"])
@pytest.mark.parametrize("call", ["count", "encode", "count_inside"])
def test_a_tokenizer_that_multiplies_a_text_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, call: str
) -> None:
    tenfold = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10}
    tokenizer = growing(tmp_path / "t.json", normalizer={"type": "Sequence", "normalizers": [tenfold] * 7})
    monkeypatch.setattr(tokenizer_module, "_LEAST_SECONDS", 0.1 if limit == "time" else 60.0)
    monkeypatch.setattr(tokenizer_module, "_MOST_MEMORY_BYTES", 1 << (24 if limit == "memory" else 34))
    text: Any = pa.array(["xx"]) if call == "count" else "xx" if call == "count_inside" else b"xx"
    with pytest.raises(ManifestError, match=r"it took more than 0\.1 s" if limit == "time" else "GiB of memory"):
        getattr(tokenizer, call)(text)


def test_a_text_has_a_bounded_number_of_tokens(tmp_path: Path) -> None:
    whole = {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [whole] * 5000, "pair": [whole, whole], "special_tokens": {}}
    tokenizer = growing(tmp_path / "t.json", post_processor=template)
    with pytest.raises(ManifestError, match="cannot encode a text of 1 character: it makes 5,000 tokens of it"):
        tokenizer.encode(b"x")


def test_what_the_library_prints_when_it_panics_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class PanicError(BaseException):
        pass

    def panic(texts: list[str]) -> None:
        os.write(2, b"thread '<unnamed>' panicked")
        raise PanicError("no entry found")

    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tokenizer, "_tokenizer", SimpleNamespace(encode_batch_fast=panic))
    with pytest.raises(ManifestError, match="it gives up with 'no entry found'"):
        tokenizer.count(pa.array(["a"]))
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"


def test_a_file_name_that_is_not_text_is_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a.txt": b"abc"})
    with open(bytes(tree) + b"/\xff.txt", "wb") as file:  # noqa: PTH123  pathlib has no byte paths
        file.write(b"x")
    with raises(
        snapshot(
            "ManifestError: 'FOLDER/tree/\\udcff.txt' has a name that is not UTF-8; rename it or exclude it with --exclude"
        )
    ):
        build(tree, tmp_path / "m.parquet")


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    vocab_size=st.integers(1, 1000),
    seed=st.integers(0, 2**63),
)
def test_synthetic_tokens_depend_on_row_and_seed_alone(lengths: list[int], vocab_size: int, seed: int) -> None:
    table: npt.NDArray[np.int64] = np.array(lengths, np.int64)
    one, other = SyntheticTokens(table, vocab_size, seed), SyntheticTokens(table, vocab_size, seed)
    forwards = [one(row).tolist() for row in range(len(lengths))]
    backwards = [other(row).tolist() for row in reversed(range(len(lengths)))]
    assert forwards == backwards[::-1]
    assert [len(tokens) for tokens in forwards] == lengths
    assert all(0 <= token < vocab_size for tokens in forwards for token in tokens)


def test_synthetic_tokens_differ_between_rows_and_seeds() -> None:
    lengths = np.full(3, 64)
    drawn = {tuple(SyntheticTokens(lengths, 256, seed)(row)) for seed in (0, 1) for row in range(3)}
    assert len(drawn) == 6


def test_the_header_names_format_source_and_what_was_left_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"text": "abc"}, {"text": None}])
    build(source, tmp_path / "m.parquet")
    metadata = pq.read_schema(tmp_path / "m.parquet").metadata
    assert json.loads(metadata[b"fcp"]) == {
        "format": "fcp-manifest/1",
        "source": {
            "kind": "jsonl",
            "path": str(source),
            "files": ["d.jsonl"],
            "column": "text",
            "tokenizer": "bytes",
            "vocab_size": 256,
        },
        "skipped": {"empty": 1},
    }
