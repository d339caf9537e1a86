"""Plan hash: equal content has an equal hash, independent of the writer and of the split into row groups.

One running SHA-256 per column over little-endian values (a list column has two: list lengths and values), then one
over the column digests and the canonical metadata. Streaming, so a plan of any size is hashed in constant memory.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.plan.metadata.plan_metadata import PlanMetadata

_SCALARS = {
    "step": "<i8",
    "order": "<i4",
    "wave": "<i4",
    "start_seconds": "<f8",
    "seconds": "<f8",
    "step_seconds": "<f8",
    "step_bound_seconds": "<f8",
}
_HEADS_DEGREE = (
    "heads_degree",
    "<i4",
)  # optional column, so that plans without it keep their hash from before it existed
_LISTS = {"ranks": "<i4", "sequences": "<i8", "lengths": "<i4"}


class PlanHasher:
    """Streaming hasher of plan rows, which must arrive in order, in pieces of any size."""

    def __init__(self) -> None:
        names = [*_SCALARS, *(f"{name}.{part}" for name in _LISTS for part in ("length", "values"))]
        self._digests: dict[str, Any] = {name: hashlib.sha256() for name in names}

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Hash the next rows."""
        for batch in rows.to_batches() if isinstance(rows, pa.Table) else (rows,):
            for name, dtype in self._scalars_of(batch):
                self._feed(name, batch.column(name).to_numpy(zero_copy_only=False), dtype)
            for name, dtype in _LISTS.items():
                column = batch.column(name)
                # Sizes instead of offsets: offsets depend on where a row group begins.
                self._feed(f"{name}.length", np.diff(column.offsets.to_numpy()), "<i4")
                self._feed(f"{name}.values", column.flatten().to_numpy(zero_copy_only=False), dtype)

    def _scalars_of(self, batch: pa.RecordBatch) -> list[tuple[str, str]]:
        scalars = list(_SCALARS.items())
        if _HEADS_DEGREE[0] in batch.schema.names:
            self._digests.setdefault(_HEADS_DEGREE[0], hashlib.sha256())
            scalars.append(_HEADS_DEGREE)
        return scalars

    def _feed(self, name: str, values: Any, dtype: str) -> None:
        # Fixed width and byte order: the hash depends neither on the writer's types nor on the machine.
        self._digests[name].update(np.ascontiguousarray(values, dtype=dtype).tobytes())

    def hexdigest(self, metadata: PlanMetadata) -> str:
        """Return the plan hash, 64 hexadecimal digits."""
        total = hashlib.sha256(metadata.hashed_json())
        for name, digest in self._digests.items():
            total.update(name.encode())
            total.update(digest.digest())
        return total.hexdigest()
