"""Plans for the tests of trainers of vision models: rings, packs and text among pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fcp_cli.plan.metadata import planned_masks
from fcp_cli.util.masks import MaskRows
from tests.runtime.plans import Row, write_plan
from tests.runtime.trainer_plans import GLOBAL_BATCH
from tests.runtime.vision_families import FAMILIES, Family
from tests.runtime.vision_inputs import image_spans
from tests.runtime.vision_models import rows

NUM_ROWS = 3 * GLOBAL_BATCH


def write_vision_plan(folder: Path, family: Family, num_ranks: int = 2) -> Path:
    """Three steps; sequences are those of `inputs_of`, in order."""
    path = folder / f"{family}-{num_ranks}.parquet"
    steps = _two_ranks(family) if num_ranks == 2 else _four_ranks(family)
    if family != "gemma3":
        return write_plan(path, steps, num_ranks=num_ranks, rows=NUM_ROWS)
    masks = _image_masks(family)
    planned = planned_masks(masks)
    return write_plan(
        path,
        steps,
        num_ranks=num_ranks,
        rows=NUM_ROWS,
        masked_sequences=int(sum(np.diff(masks.offsets) > 0)),
        masks=planned,
    )


def _two_ranks(family: Family) -> list[list[Row]]:
    return [
        rows(([0, 1], [0, 1]), ([0], [2]), ([1], [3, 4]), ([0], [0]), ([1], [1, 2]), family=family),
        rows(([1], [3, 4, 0]), ([0, 1], [1, 2]), ([0], [3, 4]), ([1], [0]), first=8, family=family),
        rows(([0], [1, 2]), ([0, 1], [3, 4, 0, 1]), ([0], [2, 3]), first=16, family=family),
    ]


def _four_ranks(family: Family) -> list[list[Row]]:
    last = rows(([0, 1, 2, 3], [1, 2]), ([0, 3], [3, 4, 0, 1]), ([1], [2, 3]), first=16, family=family)
    return [
        rows(([0, 1, 3], [0, 1, 2]), ([2], [3, 4]), ([1, 2], [0, 1]), ([3], [2]), family=family),
        rows(([1], [3, 4, 0]), ([0, 2], [1, 2]), ([3], [3, 4, 0]), first=8, family=family),
        [*last, Row([2])] if not any(2 in row.ranks for row in last) else last,
    ]


def _image_masks(family: Family) -> MaskRows:
    spans = [image_spans(FAMILIES[family].inputs_of(row)) for row in range(NUM_ROWS)]
    numbers = [[number for pair in of_row for number in pair] for of_row in spans]
    return MaskRows(
        "segments", np.cumsum([0, *map(len, numbers)]), np.array([one for of_row in numbers for one in of_row])
    )
