"""Common Parquet writer: each page and the footer have a checksum, which `reading/parquet.py` verifies."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.reading.parquet import END_BYTES, footer_mark, footer_size


@contextmanager
def parquet_writer(temporary: Path, schema: pa.Schema, *, deltas: Collection[str] = ()) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file to a temporary path from `replaced_atomically`.

    `deltas` are integer (list) columns stored delta-encoded; others are dictionary-encoded.
    """
    leaf_of = {
        field.name: f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema
    }
    others = [leaf for name, leaf in leaf_of.items() if name not in deltas]
    encodings = {leaf_of[name]: "DELTA_BINARY_PACKED" for name in deltas}
    # Without Arrow's copy of the schema, readers take the footer's key-value metadata as schema metadata. So a plan's
    # totals and hash, known only at the end, can be schema metadata of a streamed file.
    with (
        pa.OSFile(str(temporary), "wb") as sink,
        pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            store_schema=False,
            write_page_checksum=True,
            use_dictionary=others,
            column_encoding=encodings or None,
        ) as writer,
    ):
        yield writer
    with temporary.open("r+b") as file:
        file.seek(-END_BYTES, os.SEEK_END)
        size = footer_size(file.read())
        file.seek(-size, os.SEEK_END)
        footer = file.read()
        file.seek(-size, os.SEEK_END)
        file.write(footer_mark(footer) + footer)
