"""The tables of `docs/research/study.md`: whatever stands between its marks is written anew."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from benchmarks.study.parts import Study, geometric_mean
from benchmarks.study.published import (
    CLAIMS,
    COMPUTE_SECONDS,
    EXTREME_SPEEDUP,
    PAPER_OF,
    SCALING_SPEEDUPS,
    SCHEDULE_SECONDS,
    Encoder,
)
from benchmarks.study.runs import OURS, PAPER, SPLIT, STANDARD, STATIC, SYNCS, ULYSSES, Cell, EncoderGain


def fill(text: str, study: Study) -> str:
    """The page with every block between `<!-- begin NAME -->` and `<!-- end NAME -->` written anew.

    Raises:
        ValueError: a block of the study has no place in the page.
    """
    for name, block in _BLOCKS.items():
        marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        found = marks.search(text)
        if found is None:
            raise ValueError(f"the page has no marks '<!-- begin {name} -->' and '<!-- end {name} -->'")
        written = "\n".join(block(study))
        before, after = text[: found.end(1)], text[found.start(2) :]
        text = f"{before}\n{written}\n\n{after}"
    return text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _both(speedups: Iterable[float]) -> str:
    """Speed-ups under `microbatch` and under `iteration`."""
    return " / ".join(f"{speedup:.2f}x" for speedup in speedups)


def _run(study: Study) -> Iterator[str]:
    scope, setting = study.scope, study.grid[0].setting
    yield (
        f"{len(study.grid)} cells: mean of {scope.steps} steps of {setting.batch_size} sequences on {setting.ranks} "
        f"ranks of {setting.tokens_per_rank:,} tokens."
    )


def _lengths(study: Study) -> Iterator[str]:
    seen: dict[tuple[str, str], Cell] = {}
    for cell in study.grid:
        seen.setdefault((cell.setting.dataset, cell.setting.family), cell)
    head = ("data set", "tokens by", "mean length", "longest", "tokens a step")
    yield from _table(head, ((*source, *_shape(cell)) for source, cell in sorted(seen.items(), key=lambda i: i[0][1])))


def _shape(cell: Cell) -> tuple[str, str, str]:
    mean = cell.tokens_per_step / cell.setting.batch_size
    return f"{mean:,.0f}", f"{cell.longest_tokens:,}", f"{cell.tokens_per_step / 1e6:.2f} M"


def _summary(study: Study) -> Iterator[str]:
    head = (
        "cluster",
        "encoder",
        "data set",
        "fcp-paper over standard packing",
        "**fcp** over standard packing",
        "**fcp** over Ulysses (models)",
        "**fcp** over static",
        "fcp, 2d over fcp",
        "papers, measured",
    )
    yield from _table(head, _summary_rows(study))


def _summary_rows(study: Study) -> Iterator[Sequence[str]]:
    def key(cell: Cell) -> tuple[str, Encoder, str]:
        return cell.setting.cluster, cell.setting.encoder, cell.setting.dataset

    for (cluster, encoder, dataset), group in groupby(study.grid, key):
        cells = list(group)
        ratios = ((PAPER, STANDARD), (OURS, STANDARD), (OURS, ULYSSES), (OURS, STATIC), (SPLIT, OURS))
        means = [_mean(cells, of=of, over=over) for of, over in ratios]
        claim = CLAIMS.get((cluster, encoder))
        named = sorted(value for (_, where), value in (claim.bars.items() if claim else ()) if where == dataset)
        yield cluster, encoder, dataset, *means, ", ".join(f"{value:.2f}x" for value in named) or "-"


def _mean(cells: Sequence[Cell], *, of: str, over: str) -> str:
    """The mean of the models that both can plan, and of how many where it is not all of them."""
    both = [cell for cell in cells if (over, SYNCS[0]) in cell.outcomes]
    if not both:
        return "-"
    mean = _both([geometric_mean(both, sync, of=of, over=over) for sync in SYNCS])
    return mean if len(both) == len(cells) else f"{mean} ({len(both)})"


def _claims(study: Study) -> Iterator[str]:
    del study
    yield from _table(
        ("paper, cluster", "encoder", "range of its 18 bars", "above 1.2x", "where"),
        (
            (
                f"{PAPER_OF[cluster]}, {cluster}",
                encoder,
                f"{claim.lowest:.2f}x to {claim.highest:.2f}x",
                "-" if claim.above_1_2 is None else str(claim.above_1_2),
                claim.where,
            )
            for (cluster, encoder), claim in CLAIMS.items()
        ),
    )


def _bars(study: Study) -> Iterator[str]:
    """The bars that the papers name, beside what the model says of them."""
    head = ("cluster", "encoder", "data set", "model", "paper, measured", "fcp-paper over static")
    rows = []
    for cell in study.grid:
        said = _said(cell)
        if said is not None:
            setting = cell.setting
            most = " / ".join(f"{1 + cell.outcomes[STANDARD, sync].gap:.2f}x" for sync in SYNCS)
            modelled = (cell.speedups(of=PAPER, over=over) for over in (STATIC, STANDARD))
            where = (setting.cluster, setting.encoder, setting.dataset, setting.model)
            rows.append((*where, f"**{said:.2f}x**", *map(_both, modelled), most))
    yield from _table((*head, "fcp-paper over standard packing", "any plan over standard packing, at most"), rows)


def _said(cell: Cell) -> float | None:
    """The paper's own speed-up, where it names it."""
    setting = cell.setting
    claim = CLAIMS.get((setting.cluster, setting.encoder))
    return claim.bars.get((setting.model, setting.dataset)) if claim else None


def _standing(study: Study) -> Iterator[str]:
    """How many cells ours wins, and by how much it loses where it does."""
    for sync in SYNCS:
        for of, over in ((OURS, STANDARD), (OURS, ULYSSES), (OURS, STATIC), (OURS, PAPER), (SPLIT, OURS)):
            ratios = [cell.speedup(sync, of=of, over=over) for cell in study.grid if (over, sync) in cell.outcomes]
            slower = [ratio for ratio in ratios if ratio < 1]
            loses = f"; slower in {len(slower)}, by {1 / min(slower) - 1:.1%} at most" if slower else ""
            yield (
                f"- `{sync}`, {of} over {over}: {min(ratios):.2f}x to {max(ratios):.2f}x, geometric mean "
                f"{statistics.geometric_mean(ratios):.2f}x over {len(ratios)} cells{loses}."
            )


def _gains(study: Study) -> Iterator[str]:
    def kind_of(gain: EncoderGain) -> tuple[str, str, str]:
        return gain.setting.dataset, gain.setting.family, gain.setting.encoder

    rows = []
    for kind in sorted(dict.fromkeys(map(kind_of, study.gains)), key=lambda kind: kind[1:], reverse=True):
        gains = [gain for gain in study.gains if kind_of(gain) == kind]
        share = [gain.encoder_share for gain in gains]
        means = _both(statistics.geometric_mean(gain.gains[sync] for gain in gains) for sync in SYNCS)
        largest = max(max(gain.gains.values()) for gain in gains)
        rows.append((*kind, f"{min(share):.0%} to {max(share):.0%}", means, f"{largest:.2f}x"))
    head = ("data set", "models", "encoder", "its share of the work", "gain, mean of the models", "largest")
    yield from _table(head, rows)


def _scaling(study: Study) -> Iterator[str]:
    setting = study.scaling[0].setting
    yield f"{setting.model}, {setting.dataset}, encoder trained, {setting.cluster} and more of its nodes:"
    yield ""
    head = (
        "ranks",
        "sequences a step",
        "fcp, step",
        "gap",
        "tokens/s a rank",
        "fcp over standard packing",
        "fcp over static",
        "fcp, 2d over fcp",
        "papers",
        "planning, of the step",
        "fcp-paper: planning",
    )
    yield from _table(head, (_scaling_row(cell) for cell in study.scaling))


def _scaling_row(cell: Cell) -> Sequence[str]:
    ranks, ours = cell.setting.ranks, cell.outcomes[OURS, "microbatch"]
    paper = cell.outcomes.get((PAPER, "microbatch"))
    return (
        f"{ranks:,}",
        f"{cell.setting.batch_size:,}",
        " / ".join(f"{cell.outcomes[OURS, sync].step_seconds:.1f} s" for sync in SYNCS),
        " / ".join(f"{cell.outcomes[OURS, sync].gap:.1%}" for sync in SYNCS),
        f"{cell.tokens_per_step / ours.step_seconds / ranks:,.0f}",
        _both(cell.speedups(over=STANDARD)),
        _both(cell.speedups(over=STATIC)),
        _both(cell.speedups(of=SPLIT, over=OURS)),
        f"{SCALING_SPEEDUPS[ranks]:.2f}x" if ranks in SCALING_SPEEDUPS else "-",
        f"{ours.planning_seconds / ours.step_seconds:.2%}",
        "-" if paper is None else f"{paper.planning_seconds / paper.step_seconds:.2%}",
    )


def _schedule(study: Study) -> Iterator[str]:
    del study
    said = ", ".join(
        f"{SCHEDULE_SECONDS[ranks] / seconds:.1%} on {ranks} devices" for ranks, seconds in COMPUTE_SECONDS.items()
    )
    yield f"The FCP paper's own scheduling takes {said} of its step (table 2: Qwen3-VL-2B, 512 sequences), overlapped."


def _extreme(study: Study) -> Iterator[str]:
    head = ("cluster", "short sequences", "fcp, step", "fcp-paper over standard packing", "fcp over standard packing")
    yield from _table(
        (*head, "fcp over Ulysses", "fcp over static", "fcp, 2d over fcp", "FCP paper"),
        (
            (
                one.cluster,
                str(one.short),
                " / ".join(f"{one.seconds[OURS, sync]:.1f} s" for sync in SYNCS),
                _both(one.speedups(of=PAPER, over=STANDARD)),
                _both(one.speedups(over=STANDARD)),
                _both(one.speedups(over=ULYSSES)),
                _both(one.speedups(over=STATIC)),
                _both(one.speedups(of=SPLIT, over=OURS)),
                f"{EXTREME_SPEEDUP:.2f}x",
            )
            for one in study.extremes
        ),
    )


def _variants(study: Study) -> Iterator[str]:
    head = ("model", "data set", "tokens a rank", "degree: standard packing, static", "fcp over standard packing")
    yield from _table(
        (*head, "fcp over static"),
        (
            (
                cell.setting.model,
                cell.setting.dataset,
                what,
                ", ".join(str(cell.outcomes[name, "microbatch"].degree) for name in (STANDARD, STATIC)),
                _both(cell.speedups(over=STANDARD)),
                _both(cell.speedups(over=STATIC)),
            )
            for what, cell in study.variants
        ),
    )


def _cells(study: Study) -> Iterator[str]:
    def key(cell: Cell) -> tuple[str, str]:
        return cell.setting.cluster, cell.setting.encoder

    head = (
        "data set",
        "model",
        "standard packing",
        "Ulysses",
        "static",
        "fcp-paper",
        "fcp",
        "fcp, 2d",
        "gap",
        "fcp-paper over standard packing",
    )
    for (cluster, encoder), cells in groupby(study.grid, key):
        what = encoder if encoder == "text" else f"encoder {encoder}"
        yield f"**{cluster}, {what}** (modelled; the last column is the paper's, measured)"
        yield ""
        yield from _table(
            (*head, "fcp over standard packing", "fcp over static", "paper"), (_cell_row(cell) for cell in cells)
        )
        yield ""


def _cell_row(cell: Cell) -> Sequence[str]:
    said = _said(cell)
    return (
        cell.setting.dataset,
        cell.setting.model,
        *(_seconds(cell, name) for name in (STANDARD, ULYSSES, STATIC, PAPER, OURS, SPLIT)),
        f"{cell.outcomes[OURS, 'microbatch'].gap:.1%}",
        _both(cell.speedups(of=PAPER, over=STANDARD)),
        _both(cell.speedups(over=STANDARD)),
        _both(cell.speedups(over=STATIC)),
        "-" if said is None else f"{said:.2f}x",
    )


def _seconds(cell: Cell, name: str) -> str:
    outcome = cell.outcomes.get((name, "microbatch"))
    if outcome is None:
        return "-"
    return f"{outcome.step_seconds:.2f} s" + ("" if outcome.degree is None else f" <{outcome.degree}>")


_BLOCKS: dict[str, Callable[[Study], Iterator[str]]] = {
    "run": _run,
    "lengths": _lengths,
    "claims": _claims,
    "summary": _summary,
    "bars": _bars,
    "standing": _standing,
    "gains": _gains,
    "scaling": _scaling,
    "schedule": _schedule,
    "extreme": _extreme,
    "variants": _variants,
    "cells": _cells,
}
