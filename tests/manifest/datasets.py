"""Small data sets of every kind that a manifest can be built from."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.manifest.build import BuiltManifest, build_manifest
from fcp_cli.manifest.detect import SourceOptions, detect_kind, open_source
from fcp_cli.util.arrays import IntArray

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def build(source: Path, output: Path, *, kind: str | None = None, **options: Any) -> BuiltManifest:
    """Build a manifest as the command does."""
    opened = open_source(source, kind or detect_kind(source), SourceOptions(**options), output=output)
    return build_manifest(opened, output)


def tokens_at(reader: Callable[[int], Any], row: int) -> IntArray:
    """Return the tokens of a row of data that has no labels."""
    found = reader(row)
    assert isinstance(found, np.ndarray)
    return found


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return bytes(sink.getvalue().to_pybytes())


def tar(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, columns: Mapping[str, Any], *, row_group_size: int | None = None) -> Path:
    pq.write_table(pa.table(dict(columns)), path, row_group_size=row_group_size)
    return path


def write_arrow(path: Path, columns: Mapping[str, Any], *, stream: bool, rows: int = 2) -> Path:
    table = pa.table(dict(columns))
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_megatron(prefix: Path, sequences: Sequence[npt.NDArray[Any]], *, with_bin: bool = True) -> Path:
    """An `.idx` and `.bin` pair, one document per sequence, laid out as Megatron-LM's own writer does."""
    dtype = sequences[0].dtype
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    ends = np.cumsum(lengths.astype("<i8") * dtype.itemsize)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype.name], len(lengths), len(lengths) + 1)
    starts = (ends - lengths * dtype.itemsize).astype("<i8")
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    index = prefix.with_name(f"{prefix.name}.idx")
    index.write_bytes(header + lengths.tobytes() + starts.tobytes() + documents.tobytes())
    if with_bin:
        index.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    return index


def write_tokenizer(path: Path) -> Path:
    """Words `a` to `e` are 1 to 5, anything else 0, and the post-processor puts 9 in front; it wants to truncate."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "[CLS]": 9}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 9)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return path
