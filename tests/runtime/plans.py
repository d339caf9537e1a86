"""Plans for the runtime's tests: written by hand as rows, or drawn at random under either sync."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.plan.step import MicroBatch, StepPlan


class Row(NamedTuple):
    """One micro-batch; no lengths make an idle row."""

    ranks: Sequence[int]
    lengths: Sequence[int] = ()
    wave: int = -1
    heads_degree: int = 1


def levels_profile(*levels: RecomputeLevel) -> str:
    """A cost profile of layers that recompute as needed."""
    profile = CostProfile(
        model="m",
        cluster="c",
        origin="assumed",
        coefficients=Coefficients(
            attention_seconds_per_token2=1e-9,
            linear_seconds_per_token=1e-4,
            ring_bytes_per_token=1.0,
            microbatch_seconds=0.01,
        ),
        bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
        recipe=Recipe(recompute="as-needed"),
        recompute_levels=levels,
    )
    return dump_cost_profile(profile)


def write_plan(
    path: Path,
    steps: Sequence[Sequence[Row]],
    *,
    num_ranks: int,
    sync: Sync = "iteration",
    rows: int = 1 << 20,
    **facts: Any,
) -> Path:
    """Write a plan whose sequences are numbered in order of appearance, of a manifest of so many rows.

    `facts` are further ones of its metadata.
    """
    sequences = 0
    shares_heads = any(row.heads_degree > 1 for step in steps for row in step)
    metadata = replace(_metadata(num_ranks, sync, rows), attention="2d" if shares_heads else None, **facts)
    with plan_writer(path, metadata) as writer:
        for number, step in enumerate(steps):
            writer.append(make_step(step, step=number, first_sequence=sequences, shares_heads=shares_heads))
            sequences += sum(len(row.lengths) for row in step)
    return path


def _metadata(num_ranks: int, sync: Sync, rows: int) -> PlanMetadata:
    return PlanMetadata(
        fcp_version="test",
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
        sync=sync,
        global_batch_size=8,
        tokens_per_rank=1 << 20,
        seed=0,
        shuffle=False,
        solver="by hand",
        manifest=ManifestReference(name="lengths.parquet", rows=rows, content_hash="0" * 64),
        cost_profile="",
    )


def make_step(rows: Sequence[Row], *, step: int, first_sequence: int, shares_heads: bool = False) -> StepPlan:
    lengths = [length for row in rows for length in row.lengths]
    seconds = np.array([float(sum(row.lengths)) / len(row.ranks) for row in rows])
    return StepPlan(
        step=step,
        wave=np.array([row.wave for row in rows], dtype=np.int32),
        rank_offsets=np.cumsum([0, *(len(row.ranks) for row in rows)], dtype=np.int64),
        ranks=np.array([rank for row in rows for rank in row.ranks], dtype=np.int32),
        sequence_offsets=np.cumsum([0, *(len(row.lengths) for row in rows)], dtype=np.int64),
        sequences=np.arange(first_sequence, first_sequence + len(lengths), dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int32),
        start_seconds=np.zeros(len(rows)),
        seconds=seconds,
        makespan_seconds=float(seconds.sum()),
        bound_seconds=float(seconds.max()),
        heads_degree=np.array([row.heads_degree for row in rows], dtype=np.int32) if shares_heads else None,
    )


def microbatch(
    lengths: Sequence[int], ranks: Sequence[int] = (0,), *, step: int = 0, order: int = 0, first_sequence: int = 0
) -> MicroBatch:
    """One micro-batch of a plan, whose sequences are numbered on from `first_sequence`."""
    return MicroBatch(
        step=step,
        order=order,
        wave=-1,
        ranks=tuple(ranks),
        sequences=tuple(range(first_sequence, first_sequence + len(lengths))),
        lengths=tuple(lengths),
        start_seconds=0.0,
        seconds=1.0,
    )


def random_steps(num_ranks: int, num_steps: int, *, sync: Sync, seed: int, longest_tokens: int = 40) -> list[list[Row]]:
    """Steps with rings over any ranks, of any degree, packs of any lengths from 1 token on, and idle ranks."""
    draw = random.Random(seed)
    make = _iteration_step if sync == "iteration" else _wave_step
    return [make(draw, num_ranks, longest_tokens) for _ in range(num_steps)]


def sharing_heads(steps: list[list[Row]], *, seed: int, most: int = 4) -> list[list[Row]]:
    """The same steps on groups of which many share heads, in any number that divides the degree and `most`."""
    draw = random.Random(seed)

    def shared(row: Row) -> Row:
        choices = [u for u in range(1, most + 1) if not len(row.ranks) % u and not most % u]
        return row._replace(heads_degree=draw.choice(choices))

    return [[shared(row) for row in step] for step in steps]


def _iteration_step(draw: random.Random, num_ranks: int, longest_tokens: int) -> list[Row]:
    rows = []
    for _ in range(draw.randint(2, 5)):
        ranks = sorted(draw.sample(range(num_ranks), draw.randint(1, num_ranks)))
        rows.append(Row(ranks, _lengths(draw, longest_tokens)))
    busy = {rank for row in rows for rank in row.ranks}
    return rows + [Row([rank]) for rank in range(num_ranks) if rank not in busy]


def _wave_step(draw: random.Random, num_ranks: int, longest_tokens: int) -> list[Row]:
    rows: list[Row] = []
    for wave in range(draw.randint(1, 3)):
        ranks = draw.sample(range(num_ranks), num_ranks)
        while ranks:
            group = sorted(ranks.pop() for _ in range(draw.randint(1, len(ranks))))
            idle = len(group) == 1 and rows and draw.random() < 0.3
            rows.append(Row(group, () if idle else _lengths(draw, longest_tokens), wave))
    return rows


def _lengths(draw: random.Random, longest_tokens: int) -> list[int]:
    return [draw.choice((1, 2, 3, draw.randint(1, longest_tokens))) for _ in range(draw.randint(1, 4))]
