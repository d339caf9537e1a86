"""Masks that columns of the data describe: what a manifest says of them, and what training is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.mask_column import mask_rule
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import build_command, manifest_source
from fcp_cli.manifest.tokens import open_tokens
from fcp_cli.util.masks import CAUSAL, Mask, MaskedSequence, chunk_pairs, full, prefix, segments
from tests.manifest.datasets import build, write_jsonl, write_parquet, write_tree
from tests.messages import raises

ROWS = [[1] * 10, [], [2] * 8, [3] * 4]  # the second is left out


def masks_of(manifest: Path) -> list[Mask]:
    reader: Any = open_tokens(manifest)
    found = [reader(row) for row in range(len(read_manifest(manifest)))]
    assert all(isinstance(one, MaskedSequence) for one in found)
    assert [one.tokens.tolist() for one in found] == [row for row in ROWS if row]
    return [one.mask for one in found]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("kind", "column", "masks"),
    [
        ("prefix", [4, 7, None, 0], [prefix(4), CAUSAL, CAUSAL]),
        ("segments", [[[0, 3], [5, 9]], [], [], None], [segments([(0, 3), (5, 9)]), CAUSAL, CAUSAL]),
        (
            "types",
            [[0, 1, 1, 1, 0, 1, 0, 1, 1, 2], [], None, [0, 0, 0, 1]],
            [segments([(1, 4), (7, 9)]), CAUSAL, CAUSAL],
        ),
        ("pairs", [[2, 3], [], [1, 1, 2], None], [chunk_pairs([2, 3]), chunk_pairs([1, 1, 2]), CAUSAL]),
    ],
)
def test_a_column_gives_masks_and_their_exact_factor(
    tmp_path: Path, suffix: str, kind: str, column: list[Any], masks: list[Mask]
) -> None:
    if suffix == ".jsonl":
        records = [{"input_ids": ids, "shape": value} for ids, value in zip(ROWS, column, strict=True)]
        source = write_jsonl(tmp_path / "d.jsonl", records)
    else:
        source = write_parquet(tmp_path / "d.parquet", {"input_ids": ROWS, "shape": column})
    build(source, tmp_path / "m.parquet", column="input_ids", mask=f"{kind}:shape")
    assert masks_of(tmp_path / "m.parquet") == masks
    table = read_manifest(tmp_path / "m.parquet")
    lengths = table.length_tokens.tolist()
    assert table.eta is not None
    assert table.eta.tolist() == [mask.eta(length) for mask, length in zip(masks, lengths, strict=True)]
    recorded = manifest_source(tmp_path / "m.parquet")
    assert recorded is not None
    assert f"--mask {kind}:shape" in build_command(recorded, tmp_path / "m.parquet")


def test_full_needs_no_column(tmp_path: Path) -> None:
    write_tree(tmp_path / "texts", {"a.txt": b"words", "b.txt": b"x"})
    build(tmp_path / "texts", tmp_path / "m.parquet", mask="full")
    reader: Any = open_tokens(tmp_path / "m.parquet")
    table = read_manifest(tmp_path / "m.parquet")
    assert reader(0).mask == full()
    assert table.eta is not None
    assert table.eta.tolist() == [1.0, 0.0]
    assert "mask" not in pq.read_schema(tmp_path / "m.parquet").names


def test_chunk_pairs_cost_less_than_causal_attention(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "d.parquet", {"length": [2000], "chunks": [[100] * 10]})
    build(source, tmp_path / "m.parquet", mask="pairs:chunks")
    table = read_manifest(tmp_path / "m.parquet")
    assert table.eta is not None
    assert table.eta[0] == pytest.approx(-0.45, abs=1e-3)


WRONG: dict[str, tuple[str, list[Any]]] = {
    "a negative prefix": ("prefix:shape", [4, 7, -1, 0]),
    "a prefix beyond its sequence": ("prefix:shape", [4, 7, 9, 0]),
    "a prefix as text": ("prefix:shape", ["a", "b", "c", "d"]),
    "spans that are numbers": ("segments:shape", [[0, 3], [], [], []]),
    "spans out of order": ("segments:shape", [[[5, 7], [0, 3]], [], [], []]),
    "chunks that do not make the sequence": ("pairs:shape", [[2, 3], [], [1, 2], None]),
    "another column": ("prefix:other", [4, 7, 1, 0]),
}
WRONG_MESSAGES = snapshot(
    {
        "a negative prefix": "ManifestError: FOLDER/d.parquet: sequence 2, column 'shape': a prefix has -1 tokens; it has 0 or more; correct the data",
        "a prefix beyond its sequence": "ManifestError: FOLDER/d.parquet: sequence 2, column 'shape': it has 8 tokens, but its mask has a span up to token 9; correct the data",
        "a prefix as text": "ManifestError: FOLDER/d.parquet: sequence 0, column 'shape': 'a' is not a whole number of tokens; correct the data",
        "spans that are numbers": "ManifestError: FOLDER/d.parquet: sequence 0, column 'shape': '[0, 3]' is not a list of [start, stop] of spans; correct the data",
        "spans out of order": "ManifestError: FOLDER/d.parquet: sequence 0, column 'shape': span (0, 3) of a mask does not follow token 7; spans are (start, stop), ascending; correct the data",
        "chunks that do not make the sequence": "ManifestError: FOLDER/d.parquet: sequence 2, column 'shape': it has 8 tokens, but its mask has chunk pairs of 6 tokens, which cannot be truncated; correct the data",
        "another column": "ManifestError: FOLDER/d.parquet has no column 'other' for --mask; its columns are input_ids, shape",
    }
)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_mask_of_its_sequence_is_named(tmp_path: Path, case: str) -> None:
    mask, column = WRONG[case]
    source = write_parquet(tmp_path / "d.parquet", {"input_ids": ROWS, "shape": column})
    with raises(WRONG_MESSAGES[case]):
        build(source, tmp_path / "m.parquet", column="input_ids", mask=mask)


@pytest.mark.parametrize("value", ["1" * 40, '"\\ud800"'])
def test_numbers_and_texts_that_no_column_holds_are_one_line(tmp_path: Path, value: str) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text(f'{{"input_ids": [1, 2, 3], "shape": {value}}}\n')
    with pytest.raises(
        ManifestError, match=r"d\.jsonl: field 'shape' holds values of several kinds, or none of a mask"
    ):
        build(source, tmp_path / "m.parquet", column="input_ids", mask="prefix:shape")
    assert not (tmp_path / "m.parquet").exists()


@pytest.mark.parametrize("text", ["causal", "prefix", "full:shape"])
def test_what_is_no_rule_is_named(text: str) -> None:
    with raises(
        f"UsageError: --mask {text} is not one of full, prefix:COLUMN, segments:COLUMN, types:COLUMN or pairs:COLUMN"
    ):
        mask_rule(text)


def test_masks_need_a_source_that_has_the_column_and_none_of_the_factor(tmp_path: Path) -> None:
    write_tree(tmp_path / "texts", {"a.txt": b"words"})
    with raises(
        snapshot("UsageError: --mask prefix:shape needs JSONL, Parquet or Arrow with that column, not --kind text")
    ):
        build(tmp_path / "texts", tmp_path / "m.parquet", mask="prefix:shape")
    source = write_parquet(tmp_path / "d.parquet", {"length": [3], "eta": [0.5]})
    with raises(snapshot("ManifestError: FOLDER/d.parquet has a column 'eta', which --mask computes; use one of them")):
        build(source, tmp_path / "m.parquet", mask="full")
