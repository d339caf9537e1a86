from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.tokens import open_tokens
from fcp_cli.plan.file import PlanReader
from fcp_cli.training.data import check_tokenizer, has_tokens, open_data
from tests.manifest.datasets import build, tokens_at
from tests.messages import raises
from tests.training.small_runs import write_manifest, write_small_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=2)
    return folder


def test_tokens_come_from_the_manifests_source(folder: Path) -> None:
    fetch = open_data(folder / "plan.parquet", [folder / "lengths.parquet"], vocab_size=256, seed=0)
    assert bytes(tokens_at(fetch, 0).tolist()).decode() == (folder / "text" / "000.txt").read_text()


def test_a_vocabulary_too_small_for_the_tokens_is_one_line(folder: Path) -> None:
    with raises(
        snapshot(
            "RunError: the tokens of FOLDER/lengths.parquet go up to 255, but the model's vocabulary has 100 entries; choose the tokenizer's own model, or build the manifest with another --tokenizer"
        )
    ):
        open_data(folder / "plan.parquet", [folder / "lengths.parquet"], vocab_size=100, seed=0)


def test_a_row_with_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    rows = pa.array([[1, 2, 3], [4, 70, 5]], pa.list_(pa.int64()))
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "tokens.parquet")
    build(tmp_path / "tokens.parquet", tmp_path / "lengths.parquet", column="input_ids")
    tokens: Any = open_tokens(tmp_path / "lengths.parquet", entries=64)
    assert len(tokens(0)) == 3
    with raises(
        snapshot(
            "ManifestError: FOLDER/tokens.parquet (row 1, column input_ids), row 1 of the manifest, has the token 70, but the model's vocabulary has 64 entries; choose the tokenizer's own model"
        )
    ):
        tokens(1)


def write_tokenizer(folder: Path, *words: str) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )
    return folder


@pytest.mark.hf
def test_a_manifest_of_another_tokenizer_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    own, other = write_tokenizer(tmp_path / "own", "?", "a", "b"), write_tokenizer(tmp_path / "other", "?", "b", "a")
    same = write_tokenizer(tmp_path / "same", "?", "a", "b")
    (same / "tokenizer.json").write_text((same / "tokenizer.json").read_text() + "\n")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "0.txt").write_text("a")
    build(tmp_path / "text", tmp_path / "lengths.parquet", tokenizer=str(own))
    for checkpoint in (own, same, tmp_path / "text"):
        check_tokenizer(tmp_path / "lengths.parquet", checkpoint)
    with raises(
        snapshot(
            "RunError: FOLDER/lengths.parquet was built with the tokenizer FOLDER/own/tokenizer.json, not with that of FOLDER/other: 'a' is token 1 there and 2 here; build it again with --tokenizer FOLDER/other"
        )
    ):
        check_tokenizer(tmp_path / "lengths.parquet", other)


def test_synthetic_tokens_have_the_planned_lengths(folder: Path) -> None:
    fetch = open_data(folder / "plan.parquet", (), vocab_size=50, seed=0)
    lengths = PlanReader(folder / "plan.parquet").planned_lengths()
    assert len(lengths) == PlanReader(folder / "plan.parquet").metadata.manifest.rows
    planned = np.flatnonzero(lengths)
    assert len(planned) == 12
    for row in planned.tolist():
        assert len(fetch(row)) == lengths[row]
        assert tokens_at(fetch, row).max() < 50


def test_lengths_alone_are_no_tokens(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [3, 4]}), tmp_path / "bare.parquet")
    assert not has_tokens(tmp_path / "bare.parquet")
    assert has_tokens(folder / "lengths.parquet")


def test_a_source_that_is_gone_is_not_replaced_by_random_tokens(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path)
    (tmp_path / "text").rename(tmp_path / "moved")
    with pytest.raises(ManifestError, match="which is gone"):
        has_tokens(manifest)
