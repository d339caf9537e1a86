"""Draws a planned step as text: a row per rank, a bar per micro-batch, dots while a rank waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.text import Text

from fcp_cli.plan.step import StepPlan

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # by ascending degree, repeated


def step_picture(
    step: StepPlan, num_ranks: int, *, columns: int, seconds: float, ascii_only: bool = False
) -> Iterator[Text]:
    """Yield a line per rank: a bar per micro-batch, which begins with its degree, and dots while idle.

    Args:
        step: the step to draw.
        num_ranks: number of ranks of the plan.
        columns: width of a line, including 3 for the rank number.
        seconds: time span of the other columns; pictures with equal spans have the same scale.
        ascii_only: draw only with - and .
    """
    line, dot = ("-", ".") if ascii_only else ("━", "·")
    scale = (columns - 3) / seconds
    colours = {int(degree): _COLOURS[i % len(_COLOURS)] for i, degree in enumerate(np.unique(step.degrees))}
    end = round(step.makespan_seconds * scale)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]  # start, end and degree
    for microbatch in step.microbatches():
        if not microbatch.is_idle:
            begin = round(microbatch.start_seconds * scale)
            until = round((microbatch.start_seconds + microbatch.seconds) * scale)
            for rank in microbatch.ranks:
                rows[rank].append((begin, until, microbatch.degree))
    for rank, strokes in enumerate(rows):
        row, at = Text(f"{rank:2} ", style="dim"), 0
        for begin, until, degree in sorted(strokes):
            row.append(dot * (begin - at), style="dim")
            row.append(f"{degree}".ljust(until - begin, line)[: until - begin], style=colours[degree])
            at = until
        row.append(dot * (end - at), style="dim")
        yield row
