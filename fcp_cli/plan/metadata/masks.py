"""Attention masks of a manifest's rows, stored in the plan's metadata so that the runtime needs no manifest."""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass

import numpy as np

from fcp_cli.masks import MaskKind, MaskRows
from fcp_cli.validation import NonNegativeCount

MOST_CHARACTERS = 1 << 22
"""Of the text of packed masks; a plan of more keeps none, and loops give them with their sequences."""
_MOST_NUMBERS = 1 << 27
_NUMBER = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMasks:
    """Masks of all rows of the manifest.

    Attributes:
        count: total count of numbers over all rows.
        packed: base64 of zlib of int32: the count of each row, then all numbers; "" for `full`, which has none.
    """

    kind: MaskKind
    count: NonNegativeCount = 0
    packed: str = ""

    def of_rows(self, rows: int) -> MaskRows:
        """Unpack the masks of a manifest of `rows` rows.

        Raises:
            ValueError: the packed text is damaged or too large.
        """
        if self.kind == "full":
            return MaskRows("full", np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
        if rows + self.count > _MOST_NUMBERS:
            raise ValueError(f"{rows} rows with {self.count} numbers")
        size = (rows + self.count) * _NUMBER.itemsize
        try:
            # Bounded to detect excess by one byte: damaged data may unpack to any size.
            found = zlib.decompressobj().decompress(base64.b64decode(self.packed, validate=True), size + 1)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(str(error)) from error
        if len(found) != size:
            raise ValueError(f"{len(found)} bytes for {rows} rows with {self.count} numbers")
        values = np.frombuffer(found, dtype=_NUMBER).astype(np.int64)
        sizes, numbers = values[:rows], values[rows:]
        if (sizes < 0).any() or int(sizes.sum()) != self.count:
            raise ValueError(f"rows of {int(sizes.sum())} numbers, not of {self.count}")
        return MaskRows(self.kind, np.concatenate(([0], np.cumsum(sizes))), numbers)


def planned_masks(masks: MaskRows | None) -> PlannedMasks | None:
    """Pack masks for a plan; None if there are none, or if they exceed the size limit."""
    if masks is None or masks.kind == "full":
        return None if masks is None else PlannedMasks(kind="full")
    values = np.concatenate((np.diff(masks.offsets), masks.numbers)).astype(_NUMBER)
    packed = base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()
    if len(packed) > MOST_CHARACTERS or len(values) > _MOST_NUMBERS:
        return None
    return PlannedMasks(kind=masks.kind, count=len(masks.numbers), packed=packed)
