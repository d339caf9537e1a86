"""Plans that somebody changed after they were made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Edit = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def edited(plan: Path, target: Path, edit: Edit) -> Path:
    """Write what `edit` makes of the rows of a plan, under the old metadata."""
    file = pq.ParquetFile(plan)
    table = file.read()
    rows = edit(table.to_pylist())
    changed = pa.Table.from_pylist(rows, schema=table.schema).replace_schema_metadata(file.metadata.metadata)
    pq.write_table(changed, target)
    return target


def change_column(name: str, change: Callable[[Any], Any], *, step: int | None = None) -> Edit:
    """Change one column, in all rows or in those of one step."""
    return lambda rows: [
        {**row, name: change(row[name])} if step is None or row["step"] == step else row for row in rows
    ]
