"""Validates the layout of a step of a plan: ranks, token budget and waves, independent of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fcp_cli.plan.pricing.padding import held_tokens
from fcp_cli.plan.pricing.setup import PlanSetup
from fcp_cli.plan.step import StepPlan
from fcp_cli.words import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A violated rule of the format at `step` and `order`; None if it concerns the whole plan or the whole step."""

    message: str
    step: int | None = None
    order: int | None = None

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        where += "" if self.order is None else f"order {self.order}: "
        return where + self.message


def check_layout(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check ranks, token budget, Ulysses degrees and waves of a step, but not its times."""
    rank_findings = list(check_ranks(step, setup))
    yield from rank_findings
    yield from _check_budget(step, setup)
    if (broken := broken_heads(step)) is not None:
        yield broken
    if not rank_findings:
        yield from _check_waves(step, setup)


def check_ranks(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check that the ranks of every row are ascending and in range, that every rank has a row, and idle rows."""
    if (broken := broken_ranks(step, setup.num_ranks)) is not None:
        yield broken
        return
    absent = np.flatnonzero(np.bincount(step.ranks, minlength=setup.num_ranks) == 0)
    if len(absent):
        message = f"rank {absent[0]} has no row ({len(absent)} ranks have none); an idle rank needs an idle row"
        yield BrokenRule(step=step.step, message=message)
    odd = step.is_idle & ((step.degrees != 1) | (step.seconds != 0))
    if odd.any():
        yield BrokenRule(
            step=step.step, order=first_of(odd), message="an idle row has one rank and takes no time; this one does not"
        )


def broken_ranks(step: StepPlan, num_ranks: int) -> BrokenRule | None:
    """Return the first row whose ranks are empty, out of range or not ascending, or None."""
    if (step.degrees < 1).any():
        return BrokenRule(step=step.step, order=first_of(step.degrees < 1), message="no ranks")
    outside = (step.ranks < 0) | (step.ranks >= num_ranks)
    if outside.any():
        at = first_of(outside)
        message = f"rank {step.ranks[at]} of a job of {num_ranks}"
        return BrokenRule(step=step.step, order=row_of_rank(step, at), message=message)
    falls = step.ranks[1:] <= step.ranks[:-1]
    falls[step.rank_offsets[1:-1] - 1] = False  # ranks need not ascend across rows
    if falls.any():
        at = first_of(falls)
        message = f"its ranks do not ascend: {step.ranks[at + 1]} follows {step.ranks[at]}"
        return BrokenRule(step=step.step, order=row_of_rank(step, at), message=message)
    return None


def row_of_rank(step: StepPlan, at: int) -> int:
    """Return the row that owns entry `at` of the step's flat ranks."""
    return int(np.searchsorted(step.rank_offsets, at, side="right")) - 1


def _check_budget(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    room = setup.tokens_per_rank * step.degrees
    held = held_tokens(step, setup.padding_multiple)
    for order in np.flatnonzero(held > room)[:1].tolist():
        tokens, ranks = counted(held[order], "token"), counted(step.degrees[order], "rank")
        padded = "" if setup.padding_multiple is None else ", with padding,"
        message = f"{tokens}{padded} on {ranks}, where {room[order]:,} fit"
        yield BrokenRule(step=step.step, order=order, message=message)


def broken_heads(step: StepPlan) -> BrokenRule | None:
    """Return the first row whose Ulysses degree does not divide its degree, or None."""
    if step.heads_degree is None:
        return None
    heads, degrees = step.heads_degree, step.degrees
    wrong = (heads < 1) | (degrees % np.maximum(heads, 1) != 0)
    if not wrong.any():
        return None
    order = first_of(wrong)
    message = f"a heads degree of {heads[order]} does not divide the degree {degrees[order]}"
    return BrokenRule(step=step.step, order=order, message=message)


def _check_waves(step: StepPlan, setup: PlanSetup) -> Iterator[BrokenRule]:
    """Check waves: -1 under `iteration`; under `microbatch` numbered from 0, each using every rank once."""
    if setup.sync == "iteration":
        if (step.wave != -1).any():
            order = first_of(step.wave != -1)
            yield BrokenRule(
                step=step.step, order=order, message=f"wave {step.wave[order]} under sync iteration, not -1"
            )
        rows = np.bincount(step.ranks, minlength=setup.num_ranks)
        needless = step.is_idle & (rows[step.ranks[step.rank_offsets[:-1]]] > 1)
        for order in np.flatnonzero(needless)[:1].tolist():
            rank = step.ranks[step.rank_offsets[order]]
            yield BrokenRule(step=step.step, order=order, message=f"an idle row for rank {rank}, which has other rows")
        return
    rises = step.wave[1:] - step.wave[:-1]
    if step.wave[0] != 0 or ((rises != 0) & (rises != 1)).any():
        yield BrokenRule(step=step.step, message="waves do not count up from 0")
        return
    waves = int(step.wave[-1]) + 1
    if setup.pipeline is not None and setup.pipeline.missing_waves(waves, setup.pipeline_parallel):
        message = (
            f"{counted(waves, 'wave')}, not a multiple of the {setup.pipeline_parallel} stages, with virtual stages"
        )
        yield BrokenRule(step=step.step, message=message)
    # Occurrences of each (wave, rank), flattened as wave * num_ranks + rank.
    uses = np.bincount(
        np.repeat(step.wave.astype(np.int64), step.degrees) * setup.num_ranks + step.ranks,
        minlength=waves * setup.num_ranks,
    )
    for at in np.flatnonzero(uses != 1)[:1].tolist():
        wave, rank = divmod(at, setup.num_ranks)
        yield BrokenRule(step=step.step, message=f"wave {wave} uses rank {rank} {uses[at]} times, not once")


def first_of(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    """Return the index of the first set entry of a mask."""
    return int(np.flatnonzero(mask)[0])
