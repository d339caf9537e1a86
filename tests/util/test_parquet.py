"""Parquet files with footers, names and columns that nobody should have written."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, ManifestError, PlanError
from fcp_cli.manifest.columnar import columnar, open_shard, python_rows
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import manifest_source, read_footer
from fcp_cli.manifest.tokenizer import open_tokenizer
from fcp_cli.plan.file import PlanReader
from fcp_cli.util.parquet import open_footer
from tests import messages
from tests.manifest.datasets import build, write_jsonl
from tests.plan.plans import small_plan


def written(path: Path, table: pa.Table, header: str | bytes | None = None) -> Path:
    if header is not None:
        table = table.replace_schema_metadata({b"fcp": header})
    pq.write_table(table, path)
    return path


def lengths(count: int = 4) -> pa.Table:
    return pa.table({"length": np.arange(1, count + 1)})


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("[" * 3000 + "]" * 3000, "it is nested more than 64 deep"),
        ('["fcp-plan/1"]', "it is a list, not a mapping"),
        (b'{"format": "fcp-plan/1", "many": [' + b"0," * 1_000_000 + b"0]}", "it has too many values"),
        (b'{"format": "\xff"}', "it is not UTF-8 text"),
        ('{"format": "fcp-plan/1", "num_ranks": NaN}', "NaN is not a JSON number"),
        ("7" * 5000, "a number has thousands of digits"),
    ],
)
def test_a_plan_whose_metadata_is_none_is_refused(tmp_path: Path, header: str | bytes, reason: str) -> None:
    file = written(tmp_path / "plan.parquet", lengths(), header)
    with messages.raises(f"PlanError: FOLDER/plan.parquet: the plan's metadata is damaged: {reason}"):
        PlanReader(file)


@pytest.mark.parametrize("header", ["[" * 3000, '["a"]', b"\xff", '{"format": NaN}'])
def test_a_manifest_whose_footer_says_nothing_is_read_by_its_columns(tmp_path: Path, header: str | bytes) -> None:
    assert len(read_manifest(written(tmp_path / "lengths.parquet", lengths(), header))) == 4


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["length", "length"])
    file = written(tmp_path / "lengths.parquet", table)
    with pytest.raises(ManifestError, match="it has two columns named 'length'"):
        read_manifest(file)
    with pytest.raises(PlanError, match="it has two columns named 'length'"):
        PlanReader(file)
    with pa.ipc.new_file(str(tmp_path / "lengths.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "lengths.csv").write_text("length,length\n1,2\n")
    for name in ("lengths.arrow", "lengths.csv"):
        with pytest.raises(ManifestError, match="it has two columns named 'length'"):
            read_manifest(tmp_path / name)


def test_a_column_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "lengths.parquet", pa.table({"length": [1], "abcdefgh": [2]}))
    file.write_bytes(file.read_bytes().replace(b"abcdefgh", b"\xff\xfeabcdef"))
    with pytest.raises(ManifestError, match=r"lengths\.parquet cannot be read as Parquet") as raised:
        read_manifest(file)
    assert len(str(raised.value).splitlines()) == 1
    (tmp_path / "lengths.csv").write_bytes(b"length,\xff\n1,2\n")
    with pytest.raises(ManifestError, match="a name in it, or its own, is not UTF-8"):
        read_manifest(tmp_path / "lengths.csv")


def test_a_path_that_is_not_utf_8_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    file = Path(str(tmp_path / "lengths.parquet").replace("lengths", "l\udcffngths"))
    file.write_bytes(written(tmp_path / "lengths.parquet", lengths()).read_bytes())
    with pytest.raises(ManifestError, match="a name in it, or its own, is not UTF-8"):
        read_footer(file)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**62 + 1, 5], pa.timestamp("ns")),
        ([2**62, 5], pa.duration("ns")),
        ([2**31 - 1, 5], pa.date32()),
    ],
    ids=str,
)
def test_times_that_python_cannot_hold_are_texts_or_refused(tmp_path: Path, values: list[int], kind: Any) -> None:
    table = pa.table({"text": ["a", "b"], "when": pa.array(values, kind)})
    path = written(tmp_path / "texts.parquet", table)
    (batch,) = open_shard(path).batches(["text", "when"], 8)
    try:
        rows = python_rows(batch, path)
    except FcpError as error:
        assert str(error).startswith(f"{path} cannot be read as rows (")
    else:
        assert [row["text"] for row in rows] == ["a", "b"]
        assert all(isinstance(row["when"], str) for row in rows)


def test_unsigned_lengths_beyond_64_bits_with_sign_are_refused_by_their_row(tmp_path: Path) -> None:
    file = written(tmp_path / "lengths.parquet", pa.table({"length": pa.array([5, 2**64 - 1], pa.uint64())}))
    with pytest.raises(ManifestError, match="row 1 of column 'length' is"):
        read_manifest(file)
    with pytest.raises(
        ManifestError, match=r"column 'length': Integer value 18446744073709551615 not in range: .*drop"
    ):
        list(columnar(file, [open_shard(file)], "length", open_tokenizer("bytes")).batches())


def test_any_cut_of_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    content = io.BytesIO()
    pq.write_table(lengths(100), content)
    file = tmp_path / "lengths.parquet"
    for end in range(0, len(content.getvalue()), 97):
        file.write_bytes(content.getvalue()[:end])
        with pytest.raises(ManifestError) as raised:
            read_manifest(file)
        assert len(str(raised.value).splitlines()) == 1


def outcomes(path: Path, read: Callable[[Path], Any], every: int) -> dict[str, int]:
    """Flip a bit of every so many bytes of a file, and count how each copy is read."""
    content, wanted, counts = path.read_bytes(), read(path), dict.fromkeys(("refused", "identical", "different"), 0)
    flipped = path.with_name(f"flipped-{path.name}")
    for place in range(0, len(content), every):
        changed = bytearray(content)
        changed[place] ^= 1 << (place // every % 8)
        flipped.write_bytes(changed)
        try:
            found = read(flipped)
        except FcpError:
            counts["refused"] += 1
        else:
            counts["identical" if found == wanted else "different"] += 1
    return counts


@pytest.mark.lengthy
def test_a_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a" * (1 + place % 7)} for place in range(300)])
    path = build(source, tmp_path / "lengths.parquet").path
    counts = outcomes(path, lambda copy: (read_manifest(copy).content_hash(), manifest_source(copy)), every=5)
    assert (counts["different"], counts["refused"] > 150) == (0, True)


@pytest.mark.lengthy
def test_a_flipped_bit_of_a_plan_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    def read(copy: Path) -> tuple[str, str]:
        reader = PlanReader(copy)
        return reader.metadata.to_json(), reader.content_hash()

    counts = outcomes(small_plan(tmp_path / "plan.parquet"), read, every=11)
    assert (counts["different"], counts["refused"] > 300) == (0, True)


def test_pages_of_other_writers_are_verified_if_they_have_checksums(tmp_path: Path) -> None:
    path = tmp_path / "lengths.parquet"
    pq.write_table(lengths(1000), path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    with messages.raises(
        snapshot(
            "ManifestError: FOLDER/lengths.parquet cannot be read as Parquet (could not verify page integrity, CRC checksum verification failed for page_ordinal 0): truncated, damaged or another format; copy or make it again"
        )
    ):
        read_manifest(path)


def test_a_damaged_footer_is_refused_whatever_reads_it(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    content = plan.read_bytes()
    assert content.count(b'"seed": 0') == 1
    plan.write_bytes(content.replace(b'"seed": 0', b'"seed": 1'))
    with messages.raises(
        snapshot(
            "PlanError: FOLDER/plan.parquet cannot be read as Parquet (its footer does not match its checksum): it is truncated, damaged or not a plan; make one with 'fcp plan MANIFEST'"
        )
    ):
        PlanReader(plan)
    with pytest.raises(ValueError, match="its footer does not match its checksum"):
        open_footer(plan)
