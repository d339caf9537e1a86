"""Plans of two ranks for the tests of trainers: rings, packs, idle ranks, and different numbers of micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli.cost.recipe import Recipe
from fcp_cli.plan.metadata import Sync, planned_masks
from fcp_cli.util.masks import MaskRows
from tests.runtime.models import LEVELS
from tests.runtime.plans import Row, levels_profile, write_plan

GLOBAL_BATCH = 8
LONG = 4  # times the rows and steps of the other plans
_ITERATION = (
    (
        Row((0, 1), (41, 3)),
        Row((0,), (7, 9)),
        Row((0,), (5,)),
        Row((0,), (2, 1)),
        Row((1,), (12,)),
    ),
    (
        Row((1,), (6, 14)),
        Row((0, 1), (23,)),
        Row((1,), (4,)),
        Row((1,), (11, 8, 3)),
        Row((0, 1), (1,)),
    ),
    (Row((0,), (9, 9, 9)), Row((0,), (30,)), Row((0,), (2, 17, 5, 6)), Row((1,))),
)
_WAVES = (
    (Row((0,), (41, 3), 0), Row((1,), (7,), 0), Row((0, 1), (9, 5, 2), 1), Row((0,), (1,), 2), Row((1,), (12,), 2)),
    (Row((0, 1), (6, 14, 23), 0), Row((0,), (4, 11), 1), Row((1,), (8, 3, 1), 1)),
    (Row((0,), (9, 9, 9), 0), Row((1,), (30,), 0), Row((0,), (2, 17, 5, 6), 1), Row((1,), (), 1)),
)
LENGTHS = tuple(length for step in _ITERATION for row in step for length in row.lengths)


LOOP_LENGTHS = tuple(max(length, 2) for length in LENGTHS)
"""Tokens of each row of the plans for loops that weigh all rows alike."""
PAIRED = tuple((max(length // 2, 3), max(length - length // 2, 3)) for length in LENGTHS)
"""Tokens of the preferred and the rejected sequence of each row of the plans of pairs."""


def write_plans(folder: Path) -> None:
    """Write both plans, of rows and of pairs; they have the same sequences in every step."""
    plans: tuple[tuple[str, Sync, tuple[tuple[Row, ...], ...]], ...] = (
        ("iteration.parquet", "iteration", _ITERATION),
        ("waves.parquet", "microbatch", _WAVES),
    )
    for name, sync, steps in plans:
        assert tuple(length for step in steps for row in step for length in row.lengths) == LENGTHS
        write_plan(folder / name, steps, num_ranks=2, sync=sync, rows=len(LENGTHS))
        if sync == "iteration":  # the first third of each row is a prompt that sees itself both ways
            masks = MaskRows("prefix", np.arange(len(LENGTHS) + 1), np.array(LENGTHS) // 3)
            write_plan(
                folder / "masked.parquet",
                steps,
                num_ranks=2,
                rows=len(LENGTHS),
                masked_sequences=len(LENGTHS),
                masks=planned_masks(masks),
            )
        else:
            needed: dict[str, Any] = {
                "recipe": Recipe(zero_stage=3, recompute="as-needed"),
                "cost_profile": levels_profile(*LEVELS),
            }
            write_plan(folder / "long.parquet", LONG * steps, num_ranks=2, sync=sync, rows=LONG * len(LENGTHS))
            write_plan(folder / "as-needed.parquet", steps, num_ranks=2, sync=sync, rows=len(LENGTHS), **needed)
        pairs = iter(sum(pair) for pair in PAIRED)
        paired = [[row._replace(lengths=[next(pairs) for _ in row.lengths]) for row in step] for step in steps]
        longer = [[row._replace(lengths=[max(length, 2) for length in row.lengths]) for row in step] for step in steps]
        write_plan(folder / f"loop-{name}", longer, num_ranks=2, sync=sync, rows=len(LENGTHS))
        write_plan(folder / f"pairs-{name}", paired, num_ranks=2, sync=sync, rows=len(LENGTHS))
