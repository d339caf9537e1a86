"""A step as lines of text: strokes as long as their seconds, dots where a rank waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcp_cli.cli.demo_show import step_picture
from tests.plan.steps import Row, make_step

# Rank 0 waits for a second until rank 1 is free.
STEP = replace(
    make_step([Row([0], 1.0), Row([1, 2], 2.0), Row([0, 1], 1.0)]),
    start_seconds=np.array([0.0, 0.0, 2.0]),
    makespan_seconds=3.0,
)


def test_each_rank_has_its_micro_batches_behind_their_degrees_and_dots_where_it_waits() -> None:
    rows = [row.plain for row in step_picture(STEP, 3, columns=15, seconds=3.0)]
    assert rows == [" 0 1━━━····2━━━", " 1 2━━━━━━━2━━━", " 2 2━━━━━━━····"]


def test_pictures_of_several_steps_share_a_scale() -> None:
    rows = [row.plain for row in step_picture(STEP, 3, columns=15, seconds=6.0, ascii_only=True)]
    assert rows == [" 0 1-..2-", " 1 2---2-", " 2 2---.."]


def test_what_is_shorter_than_a_column_leaves_no_stroke_behind() -> None:
    rows = [row.plain for row in step_picture(STEP, 3, columns=6, seconds=12.0)]
    assert rows == [" 0 2", " 1 2", " 2 ·"]
