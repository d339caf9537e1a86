"""The solver `fcp` for the batches of a plan: its options, groups chosen under a limit, and the price of a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.static import static_degrees
from fcp_cli.planning.batching.batches import GlobalBatches, spread_steps
from fcp_cli.planning.fcp.catalogue import choose_groups
from fcp_cli.planning.fcp.solver import TWO_LIMITS, FcpSolver, require_alike, solver_of
from fcp_cli.planning.kernel_inputs import planner_inputs
from fcp_cli.planning.problem import Batch

_CHOOSING_STEPS = 16  # planned repeatedly to choose groups under a limit
_PRICED_STEPS = 16  # planned with and without a limit


def make_solver(
    batches: GlobalBatches,
    *,
    max_degree: int | None = None,
    max_groups: int | None = None,
    max_peers: int | None = None,
) -> FcpSolver:
    """Make the solver for these batches, with the options that `--solver fcp` takes.

    Args:
        batches: the batches to plan.
        max_degree: 1 forbids rings; None: no limit.
        max_groups: maximum number of groups of degree > 1 over the whole plan; None: no limit.
        max_peers: most distinct ring neighbours per rank over the whole plan; None: no limit.
    """
    problem = batches.problem
    if problem.attention == "ulysses":
        require_heads_to_hold(batches)
    if max_groups is None:
        solver = solver_of(problem, max_degree=max_degree, max_peers=max_peers)
        if max_degree is not None:
            _require_no_long(batches)
        return solver
    if max_degree is not None:
        raise UsageError(TWO_LIMITS)
    if max_peers is not None:
        raise UsageError("--max-groups and --max-peers both choose the ranks of rings; give one of them")
    require_alike(problem)
    options = {"max_groups": max_groups}
    sample = [batches.batch(step) for step in spread_steps(len(batches), _CHOOSING_STEPS)]

    def limited_to(groups: list[range]) -> FcpSolver:
        degrees = np.array([degree for degree in static_degrees(problem) if _tiled(problem.num_ranks, degree, groups)])
        return FcpSolver(problem=problem, inputs=planner_inputs(problem, groups), degrees=degrees, options=options)

    return limited_to(
        choose_groups(
            max_groups,
            num_ranks=problem.num_ranks,
            ranks_per_node=problem.ranks_per_node,
            trial=lambda groups: _trial(limited_to(groups), sample),
        )
    )


def require_heads_to_hold(batches: GlobalBatches) -> None:
    """Raise UsageError if the widest Ulysses group cannot hold the longest sequence."""
    problem = batches.problem
    assert problem.profile.heads is not None, "a problem splits heads under a profile that prices it"
    most = max((1, *problem.profile.heads.degrees(problem.num_ranks)))
    longest, held = batches.longest_tokens, most * problem.tokens_per_rank
    if longest > held:
        raise UsageError(
            f"--attention ulysses shares {problem.profile.heads.query_heads} query heads among {most} ranks at most, "
            f"which hold {held} tokens, but a sequence has {longest}; --attention 2d makes rings of such sets"
        )


def _require_no_long(batches: GlobalBatches) -> None:
    longest, held = batches.longest_tokens, batches.problem.tokens_per_rank
    if longest > held:
        raise UsageError(
            f"--max-degree 1 forbids rings, but a sequence has {longest} tokens and a rank holds {held}; "
            f"drop longer ones with --max-length {held} --overlong drop (truncate cuts them), hold them with "
            f"--tokens-per-rank {longest}, or remove --max-degree"
        )


def _tiled(num_ranks: int, degree: int, groups: list[range]) -> bool:
    """Return whether rings of one degree can cover all ranks side by side."""
    return degree == 1 or all(range(first, first + degree) in groups for first in range(0, num_ranks, degree))


def _trial(solver: FcpSolver, sample: list[Batch]) -> tuple[float, Mapping[range, int]]:
    """Return the predicted seconds of a sample of steps, and the number of micro-batches on each ring group."""
    seconds, uses = 0.0, Counter[range]()
    for batch in sample:
        found = solver.assign(batch)
        seconds += makespan_seconds(found, batch, solver.problem)
        degrees = np.diff(found.rank_offsets)
        firsts = found.ranks[found.rank_offsets[:-1]]
        rings = zip(firsts[degrees > 1].tolist(), degrees[degrees > 1].tolist(), strict=True)
        uses.update(range(first, first + degree) for first, degree in rings)
    return seconds, uses


def limit_price(limited: FcpSolver, batches: GlobalBatches) -> float:
    """Return the price of a limit: predicted seconds with it / without it - 1, over evenly spaced steps.

    If the plan is long enough, these differ from the steps that the groups were chosen on.
    """
    free = make_solver(batches)
    # Half a stride away from the steps that the groups were chosen on: they would flatter the limit.
    sample = [batches.batch(step) for step in spread_steps(len(batches), _PRICED_STEPS, phase=0.5)]
    seconds = [sum(makespan_seconds(s.assign(b), b, batches.problem) for b in sample) for s in (limited, free)]
    return seconds[0] / seconds[1] - 1.0
