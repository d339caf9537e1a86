"""Choice of the ranks that share the work of a vision encoder: each ring, a whole wave, or dedicated encoder ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fcp_cli.cost.model import vision_seconds
from fcp_cli.errors import UsageError
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.console import Assumptions

Wanted = Literal["ring", "wave", "auto"]


def balanced_encoder(batches: GlobalBatches, wanted: Wanted, assumptions: Assumptions) -> Problem:
    """Return the batches' problem with the requested encoder balance; `auto` picks the faster one on the first step.

    Args:
        batches: batches whose problem shares encoder work within rings.
        wanted: value of `--encoder-balance`.
        assumptions: collects the choice of `auto`.

    Raises:
        UsageError: `wave` was requested without waves.
    """
    problem = batches.problem
    if wanted == "ring":
        return problem
    if problem.sync != "microbatch" or problem.pipeline is not None:
        if wanted == "auto":
            return problem
        raise UsageError(
            "--encoder-balance wave needs waves, in which all ranks synchronize; add --sync microbatch, or remove it"
            if problem.pipeline is None
            else "--encoder-balance wave needs waves, in which all ranks synchronize, unlike pipelines; remove it"
        )
    over_wave = replace(problem, encoder_balance="wave")
    if wanted == "wave":
        return over_wave
    if batches.table.vision_patches is None:
        assumptions.assume("--encoder-balance", "ring", f"{batches.table.name} has no images")
        return problem
    ring_seconds, wave_seconds = (_first_step_seconds(batches, each) for each in (problem, over_wave))
    assumptions.assume(
        "--encoder-balance",
        "wave" if wave_seconds < ring_seconds else "ring",
        f"the first step takes {ring_seconds:.4g} s over each ring, {wave_seconds:.4g} s over the wave",
    )
    return over_wave if wave_seconds < ring_seconds else problem


def with_encoder_ranks(batches: GlobalBatches, wanted: str, assumptions: Assumptions) -> Problem:
    """Return the batches' problem with some of its ranks dedicated to the encoder.

    Args:
        batches: batches whose problem runs the whole model on all ranks.
        wanted: number of encoder ranks, or `auto` for the number with the shortest first step.
        assumptions: collects the choice of `auto`.

    Raises:
        UsageError: the sync or the recipe does not allow encoder ranks, or the number is out of range.
    """
    problem, most = batches.problem, batches.problem.num_ranks - 1
    if problem.sync != "microbatch":
        raise UsageError("--encoder-ranks sends embeddings wave by wave; add --sync microbatch, or remove it")
    if problem.recipe is not None and problem.recipe.zero_stage > 1:
        raise UsageError(
            f"--encoder-ranks run ahead of the others, which FSDP2 (--zero {problem.recipe.zero_stage}) keeps in step; "
            "add --zero 1, or remove it"
        )
    if wanted == "auto":
        found = {count: _first_step_seconds(batches, set_aside(problem, count)) for count in _likely_counts(batches)}
        count = min(found, key=found.__getitem__)
        assumptions.assume(
            "--encoder-ranks", count, f"the first step takes {found[count]:.4g} s then, the least of some"
        )
        return set_aside(problem, count)
    if not wanted.isascii() or not wanted.isdecimal() or not 0 < int(wanted) <= most:
        raise UsageError(f"--encoder-ranks is {wanted!r}; it must be auto, or 1 to {most} of {most + 1} ranks")
    return set_aside(problem, int(wanted))


def set_aside(problem: Problem, count: int) -> Problem:
    """Return the problem with its last `count` ranks dedicated to the encoder."""
    ranks = problem.all_ranks - count
    return replace(
        problem,
        num_ranks=ranks,
        ranks_per_node=min(problem.ranks_per_node, ranks),
        encoder_balance="wave",
        encoder_ranks=count,
    )


def _likely_counts(batches: GlobalBatches) -> list[int]:
    """Return numbers of encoder ranks near the encoder's share of all work; the others still hold every sequence."""
    problem, batch = batches.problem, batches.batch(0)
    encoder = float(vision_seconds(batches.table.take(batch.rows), problem.profile).sum())
    even = problem.num_ranks * encoder / float(batch.work.total_seconds.sum())
    least_left = -(-int(batches.table.length_tokens.max()) // problem.tokens_per_rank)
    most = max(1, problem.num_ranks - max(least_left, 1))
    return sorted({min(max(1, round(even * factor)), most) for factor in (0.75, 0.9, 1.0, 1.1, 1.3, 1.6)})


def _first_step_seconds(batches: GlobalBatches, problem: Problem) -> float:
    under = GlobalBatches(batches.table, problem, batches.settings)
    batch, solver = under.batch(0), make_solver("fcp", under)
    return makespan_seconds(solver.assign(batch), batch, problem)
