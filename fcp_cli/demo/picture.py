"""One planned step as lines of text: a row per rank, a stroke per micro-batch, dots where a rank waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.text import Text

from fcp_cli.plan.step import StepPlan

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # of degrees in ascending order, then again


def step_picture(
    step: StepPlan, num_ranks: int, *, columns: int, seconds: float, ascii_only: bool = False
) -> Iterator[Text]:
    """Yield a line of text per rank: a bar for each micro-batch, which begins with its degree, and dots while idle.

    Args:
        step: the step to draw.
        num_ranks: the ranks of its plan.
        columns: width of a line; the first 3 are the rank's number.
        seconds: the time that the other columns stand for; give several pictures the same, and they share a scale.
        ascii_only: draw with - and . alone.
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
