"""Small real plans for the tests of the plan file, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader, schema_of
from fcp_cli.plan.metadata import METADATA_KEY, PlanHasher, PlanMetadata, Sync
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from tests.planning.examples import example_problem, long_tail

Columns = dict[str, list[Any]]


def small_plan(path: Path, sync: Sync = "iteration", *, table: LengthTable | None = None, **settings: Any) -> Path:
    """Two epochs of 63 sequences in batches of 20 on 16 ranks, unless told otherwise."""
    if table is None and not settings:
        path.write_bytes(_usual_plan(sync))
    else:
        _make(path, sync, long_tail(60) if table is None else table, settings)
    return path


@cache
def _usual_plan(sync: Sync) -> bytes:
    """Return the file of a plan that dozens of tests begin with."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.parquet"
        _make(path, sync, long_tail(60), {})
        return path.read_bytes()


def _make(path: Path, sync: Sync, table: LengthTable, settings: dict[str, Any]) -> None:
    make_plan(
        path,
        PlanInputs(
            table=table,
            problem=example_problem(sync, tokens_per_rank=8192),
            settings=BatchSettings(**{"global_batch_size": 20, "epochs": 2, **settings}),
            request=PlanRequest(solver="fcp-paper"),
        ),
    )


def rewritten(
    plan: Path,
    *,
    edit: Callable[[Columns], None] | None = None,
    rehash: bool = True,
    row_group_size: int | None = None,
    **metadata: Any,
) -> Path:
    """A copy with edited rows or metadata and, as a foreign writer would, a hash that fits them."""
    columns: Columns = pq.read_table(plan).to_pydict()
    stated: PlanMetadata = replace(PlanReader(plan).metadata, **metadata)
    if edit is not None:
        edit(columns)
    rows = pa.table(columns, schema=schema_of(splits_heads=stated.attention is not None))
    if rehash:
        hasher = PlanHasher()
        hasher.update(rows)
        stated = replace(stated, plan_hash=hasher.hexdigest(stated))
    copy = plan.with_name(f"edited-{plan.name}")
    pq.write_table(
        rows.replace_schema_metadata({METADATA_KEY: stated.to_json().encode()}), copy, row_group_size=row_group_size
    )
    return copy
