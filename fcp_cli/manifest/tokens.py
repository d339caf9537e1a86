"""Token access by manifest row, for training: read from the source, or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.chat import ChatData, ChatEncoder, ChatTokens
from fcp_cli.manifest.columnar import ColumnarTokens, columnar, open_shard
from fcp_cli.manifest.mask_column import MaskRule, mask_rule
from fcp_cli.manifest.media import MediaRecords
from fcp_cli.manifest.megatron import MegatronIndex, MegatronTokens
from fcp_cli.manifest.pictures import PICTURES_COLUMN, PictureData, PictureRecords
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources import SourceTokens
from fcp_cli.manifest.table import (
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    build_command,
    manifest_files,
    manifest_source,
    readable,
)
from fcp_cli.manifest.text import JsonLines, JsonLinesTokens, TextTokens
from fcp_cli.manifest.tokenizer import open_tokenizer
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.files import as_word
from fcp_cli.util.masks import MASK_COLUMN, MaskedSequence
from fcp_cli.util.parquet import open_parquet
from fcp_cli.util.remote import data_path
from fcp_cli.vision.processors import open_processor, recorded_processor


class SyntheticTokens:
    """Random tokens for a manifest without a source; a row is the same on every rank and in every run."""

    def __init__(self, lengths: IntArray, vocab_size: int, seed: int) -> None:
        self._lengths = lengths
        self._seed = seed
        self.vocab_size = vocab_size

    def __call__(self, row: int) -> IntArray:
        generator = np.random.default_rng([self._seed, int(row)])
        return generator.integers(0, self.vocab_size, int(self._lengths[row]), np.int64)


class TokenReader:
    """Tokens of a manifest's data by row, checked against the manifest. Thread-safe.

    Args:
        tokens: the tokens of the source.
        lengths: [rows] number of tokens of each row, as the manifest has it.
        remedy: end of messages about data that changed.
        entries: size of the model's vocabulary; None: not checked.
        rule: kind of the masks; None: sequences are causal.
        masks: [rows] Arrow lists of mask numbers; None if the kind needs none.
    """

    def __init__(
        self,
        tokens: SourceTokens,
        lengths: IntArray,
        remedy: str,
        *,
        entries: int | None = None,
        rule: MaskRule | None = None,
        masks: Any = None,
    ) -> None:
        self._tokens, self._lengths, self._remedy, self._entries = tokens, lengths, remedy, entries
        self._rule, self._masks = rule, masks

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._tokens.vocab_size

    def __call__(self, row: int) -> IntArray | tuple[IntArray, IntArray] | MaskedSequence:
        """Return the tokens of a sequence, [length] int64, or (tokens, labels); label -100 is not trained.

        Data with masks returns a `MaskedSequence`.

        Raises:
            ManifestError: the sequence changed since the manifest was built, or has a token beyond the vocabulary.
        """
        try:
            found = self._tokens(row)
        except ManifestError as error:
            if isinstance(error.__cause__, OSError):
                raise
            raise ManifestError(  # the row was read when the manifest was built
                f"the data changed since the manifest was built, so its row {row} cannot be read: {error}; "
                f"{self._remedy}"
            ) from error
        tokens, labels = found if isinstance(found, tuple) else (found, None)
        if len(tokens) != self._lengths[row]:
            raise ManifestError(
                f"{self._tokens.place(row)} changed since the manifest was built: it has {len(tokens)} tokens, but row "
                f"{row} of the manifest has {self._lengths[row]}; {self._remedy}"
            )
        if self._entries is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._entries:
            beyond = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            raise ManifestError(
                f"{self._tokens.place(row)}, row {row} of the manifest, has the token {beyond}, but the model's "
                f"vocabulary has {self._entries} entries; choose the tokenizer's own model"
            )
        if self._rule is None:
            return found
        numbers = [] if self._masks is None else self._masks[int(row)].as_py()
        return MaskedSequence(tokens=tokens, labels=labels, mask=self._rule.mask(numbers))


def open_tokens(
    manifest_path: str | Path,
    *,
    source: str | Path | None = None,
    length_column: str = "length",
    kept: Path | None = None,
    entries: int | None = None,
) -> TokenReader:
    """Open the data from which a manifest was built.

    Args:
        manifest_path: the manifest, or a Parquet data set of token lists that was planned directly.
        source: new location of the data, if it moved since the manifest was built.
        length_column: see `read_manifest`.
        kept: folder with a copy of the checkpoint's tokenizer, used if the original is gone.
        entries: size of the model's vocabulary; None: not checked.
    """
    path = Path(manifest_path)
    recorded = manifest_source(path)
    table = read_manifest(path, length_column=length_column)
    lengths = table.length_tokens
    if recorded is None:
        own = _own_tokens(path, table.column)
        return TokenReader(own, lengths, "plan it again", entries=entries)
    if source is not None:
        recorded = recorded | {"path": str(data_path(source).absolute())}
    remedy = _remedy(recorded, path)
    tokens = _source_tokens(path, _with_tokenizer(recorded, kept), remedy)
    rule = None if recorded.get("mask") is None else mask_rule(recorded["mask"])
    masks = None if rule is None or not rule.column else _column(path, MASK_COLUMN)
    return TokenReader(tokens, lengths, remedy, entries=entries, rule=rule, masks=masks)


def open_media(manifest_path: str | Path) -> MediaRecords | None:
    """Open the media sizes from which a manifest was built; None if it was not built from JSON lines of sizes."""
    path = Path(manifest_path)
    source = manifest_source(path)
    if source is None or source["kind"] != "media" or not source["path"].endswith(".jsonl") or _has_pixels(source):
        return None
    root, remedy = data_path(source["path"]), _remedy(source, path)
    if not root.exists():
        raise ManifestError(f"{path} was built from {root}, which is gone; {remedy}")
    if "byte_offset" not in open_shard(path).schema.names:
        raise ManifestError(f"{path} does not record where its records are in {root}; {remedy}")
    return MediaRecords(root, recorded_processor(source["processor"]), _integers(path, "byte_offset"))


def open_pictures(manifest_path: str | Path, *, kept: Path | None = None) -> PictureRecords | None:
    """Open the conversations about pictures from which a manifest was built; None if its source has none.

    Args:
        manifest_path: the manifest.
        kept: folder with a copy of the tokenizer and processor, used if the originals are gone.
    """
    path = Path(manifest_path)
    source = manifest_source(path)
    if source is None or not _has_pixels(source):
        return None
    root, remedy = data_path(source["path"]), _remedy(source, path)
    if not root.exists():
        raise ManifestError(f"{path} was built from {root}, which is gone; {remedy}")
    return _picture_records(path, root, _with_tokenizer(source, kept), remedy)


def _remedy(source: dict[str, Any], path: Path) -> str:
    return f"build and plan again: {build_command(source, path)}, then fcp plan {as_word(path)}"


def _with_tokenizer(source: dict[str, Any], kept: Path | None) -> dict[str, Any]:
    """Return a recorded source, with the copied tokenizer if the original is gone."""
    name = source.get("tokenizer")
    if kept is None or name in (None, "bytes") or Path(name).exists() or not (kept / "tokenizer.json").is_file():
        return source
    return source | {"tokenizer": str(kept)}


def _has_pixels(source: dict[str, Any]) -> bool:
    return source["kind"] == "media" and source.get("content") == "pixels"


def _picture_records(path: Path, root: Path, source: dict[str, Any], remedy: str) -> PictureRecords:
    missing = {"shard", "record", PICTURES_COLUMN} - set(open_shard(path).schema.names)
    if missing:
        raise ManifestError(f"{path} has no column {min(missing)!r}, which has the paths of images; {remedy}")
    processor, folder = recorded_processor(source["processor"]), Path(source["tokenizer"])
    now = open_processor(str(folder))
    if now.describe() != processor.describe():
        raise ManifestError(
            f"the processor of {folder} is not the one that {path} was counted with: its settings changed; {remedy}"
        )
    data = PictureData(
        path=root, files=_files(root, source), encoder=ChatEncoder(folder, source["train_on"], processor)
    )
    shards, records = _shards(path, source), _integers(path, "record")
    return PictureRecords(data, shards, records, _column(path, PICTURES_COLUMN), source.get("vocab_size", 0))


def _own_tokens(path: Path, length_column: str) -> SourceTokens:
    if path.suffix in (*LINE_SUFFIXES, *TABLE_SUFFIXES):
        raise ManifestError(
            f"{path} holds lengths, not tokens; train on synthetic tokens, or build and plan a manifest of the data"
        )
    data = columnar(path, [open_shard(file) for file in manifest_files(path)], length_column, open_tokenizer("bytes"))
    if data.content != "tokens":
        raise ManifestError(
            f"{path} does not record where its tokens are: it was not made by `fcp manifest build`, and column "
            f"{length_column!r} holds lengths only; train on synthetic tokens or build a manifest from the data"
        )
    return ColumnarTokens(data, np.arange(data.units or 0), None)


def _source_tokens(path: Path, source: dict[str, Any], remedy: str) -> SourceTokens:
    root = data_path(source["path"])
    if not root.exists():
        raise ManifestError(f"{path} was built from {root}, which is gone; {remedy}")
    vocab_size = source.get("vocab_size", 0)
    if source["kind"] == "text":
        return TextTokens(root, _column(path, "id"), open_tokenizer(source["tokenizer"]))
    if source["kind"] == "jsonl":
        data = JsonLines(path=root, files=_files(root, source), column=source["column"], tokenizer=_tokenizer(source))
        shards, byte_offsets = _shards(path, source), _integers(path, "byte_offset")
        return JsonLinesTokens(data, shards, byte_offsets, vocab_size)
    if source["kind"] == "chat":
        encoder = ChatEncoder(Path(source["tokenizer"]), source["train_on"])
        chat = ChatData(path=root, files=_files(root, source), encoder=encoder)
        return ChatTokens(chat, _shards(path, source), _integers(path, "record"), vocab_size)
    if _has_pixels(source):
        return _picture_records(path, root, source, remedy)
    if source["kind"] == "megatron":
        return MegatronTokens(MegatronIndex.open(root, vocab_size=source.get("vocab_size")), _integers(path, "id"))
    if source["kind"] in ("parquet", "arrow") and source["content"] != "lengths":
        opened = [open_shard(file) for file in _files(root, source)]
        columns = columnar(root, opened, source["column"], _tokenizer(source))
        return ColumnarTokens(columns, _integers(path, "id"), vocab_size)
    raise ManifestError(
        f"{path} was built from the lengths in {root}, which holds no tokens; train on synthetic tokens"
    )


def _files(root: Path, source: dict[str, Any]) -> tuple[Path, ...]:
    return tuple(root / name for name in source["files"]) if root.is_dir() else (root,)


def _tokenizer(source: dict[str, Any]) -> Any:
    return open_tokenizer(source.get("tokenizer") or "bytes")


def _integers(path: Path, name: str) -> IntArray:
    """Return an integer column that locates each row."""
    column = _column(path, name)
    if not pa.types.is_integer(column.type):
        raise ManifestError(f"{path}: the column {name} is of {column.type}; build the manifest again")
    found: IntArray = column.to_numpy()
    return found


def _shards(path: Path, source: dict[str, Any]) -> IntArray:
    """Return for each row the index of its file in the source's file list."""
    shards, files = _integers(path, "shard"), _files(data_path(source["path"]), source)
    if len(shards) and not 0 <= shards.min() <= shards.max() < len(files):
        raise ManifestError(f"{path}: the column shard names files beyond the {len(files)} of its source")
    return shards


def _column(path: Path, name: str) -> Any:
    with readable(path):
        column = open_parquet(path).read(columns=[name]).column(name).combine_chunks()
    if column.null_count:
        raise ManifestError(f"{path}: the column {name} has nulls; build the manifest again")
    return column
