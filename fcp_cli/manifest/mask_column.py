"""Sequence masks: read from a data column (`--mask`) and stored in a manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast, get_args

import pyarrow as pa

from fcp_cli.errors import ManifestError, MaskError, UsageError
from fcp_cli.manifest.sources import Part, RowBatch, Source, place_of
from fcp_cli.util.masks import MASK_COLUMN, Mask, MaskKind, mask_of, token_types

_KINDS: Final = "full, prefix:COLUMN, segments:COLUMN, types:COLUMN or pairs:COLUMN"
_WANTED: Final = {
    "prefix": "a whole number of tokens",
    "segments": "a list of [start, stop] of spans",
    "types": "a list of a type for each token, as token_type_ids",
    "pairs": "a list of the tokens of each clean chunk",
}


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Kind and column of a data set's masks.

    Attributes:
        kind: kind of all masks.
        column: column with the numbers of each mask; "" for `full`, which needs none.
    """

    kind: MaskKind
    column: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.column}" if self.column else self.kind

    def numbers(self, value: Any) -> list[int]:
        """Convert a column value to the manifest's form; null means causal."""
        if value is None:
            return []
        flat = [value] if self.kind == "prefix" else value
        if self.kind == "segments" and isinstance(value, list):
            pairs = [list(span.values()) if isinstance(span, Mapping) else span for span in value]
            flat = (
                [end for span in pairs for end in span]
                if all(isinstance(span, list) and len(span) == 2 for span in pairs)
                else None
            )
        if not isinstance(flat, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in flat):
            raise MaskError(f"{str(value)[:40]!r} is not {_WANTED[self.kind]}")
        return list(token_types(flat).numbers) if self.kind == "types" else flat

    def mask(self, numbers: list[int]) -> Mask:
        """Build a mask from the manifest's form."""
        return mask_of(self.kind, numbers)


def mask_rule(text: str) -> MaskRule:
    """Parse the value of `--mask`."""
    kind, _, column = text.partition(":")
    if kind not in get_args(MaskKind) or bool(column) == (kind == "full"):
        raise UsageError(f"--mask {text} is not one of {_KINDS}")
    return MaskRule(cast(MaskKind, kind), column)


@dataclass(frozen=True, slots=True)
class MaskedSource(Source):
    """Adds masks to a source: an `eta` column, and the mask numbers unless all masks are `full`.

    Attributes:
        source: has the rule's column under the name `mask`, if the rule names one.
        rule: kind and column of the masks.
    """

    source: Source
    rule: MaskRule

    @property
    def units(self) -> int | None:
        return self.source.units

    @property
    def is_divisible(self) -> bool:  # type: ignore[override]
        return self.source.is_divisible

    @property
    def files(self) -> tuple[Path, ...]:  # type: ignore[override]
        return self.source.files

    @property
    def parts(self) -> int:
        return self.source.parts

    @property
    def is_streamed(self) -> bool:
        return self.source.is_streamed

    def only(self, part: Part) -> MaskedSource:
        return replace(self, source=self.source.only(part))

    def describe(self) -> dict[str, Any]:
        return self.source.describe() | {"mask": str(self.rule)}

    def batches(self) -> Iterator[RowBatch]:
        return map(self._masked, self.source.batches())

    def groups(self) -> Iterator[Any]:
        return self.source.groups()

    def count(self, group: Any) -> RowBatch:
        return self._masked(self.source.count(group))

    def _masked(self, batch: RowBatch) -> RowBatch:
        return replace(batch, rows=self._with_eta(batch))

    def _with_eta(self, batch: RowBatch) -> Any:
        rows = batch.rows
        if "eta" in rows.schema.names:
            raise ManifestError(
                f"{self.source.describe()['path']} has a column 'eta', which --mask computes; use one of them"
            )
        lengths = rows.column("length").to_pylist()
        values = rows.column(MASK_COLUMN).to_pylist() if self.rule.column else [None] * len(lengths)
        kept, etas = [], []
        for row, (length, value) in enumerate(zip(lengths, values, strict=True)):
            try:
                numbers = self.rule.numbers(value)
                mask = self.rule.mask(numbers)
                misfit = mask.misfit(length) if length else ""
                if self.rule.kind == "types" and value is not None and len(value) != length:
                    misfit = f"{len(value)} types of tokens"
                if misfit:
                    raise MaskError(f"it has {length} tokens, but {misfit}")
            except MaskError as error:
                place = place_of(self.source, batch, row)
                raise ManifestError(f"{place}, column {self.rule.column!r}: {error}; correct the data") from error
            kept.append(numbers)
            etas.append(mask.eta(length) if length else 0.0)
        columns = {name: rows.column(name) for name in rows.schema.names if name != MASK_COLUMN}
        masks = {MASK_COLUMN: pa.array(kept, pa.list_(pa.int32()))} if self.rule.column else {}
        return pa.record_batch(columns | {"eta": pa.array(etas, pa.float64())} | masks)
