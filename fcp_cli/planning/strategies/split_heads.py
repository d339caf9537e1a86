"""`deepspeed-ulysses` and `usp`: one degree and one Ulysses degree for the whole plan.

DeepSpeed-Ulysses (Jacobs et al., 2023) gives each rank of a group all tokens of some heads. The degree divides the
query heads, and each rank holds whole key/value heads, or a copy of one. USP (Fang and Zhao, 2024) and LoongTrain (Gu
et al., 2024) split heads among u ranks inside a node and tokens over a ring of r such sets, with a fixed u x r. Both
are tuned like `static`: the fastest degree, u and packing over the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import quickest_solver
from fcp_cli.planning.fcp_solver import require_heads_to_hold
from fcp_cli.planning.static import TUNING_STEPS, StaticSolver, static_candidates


def make_ulysses(batches: GlobalBatches) -> StaticSolver:
    """Make the fastest static solver whose groups are single Ulysses sets.

    Raises:
        UsageError: the profile or `--attention` does not fit, or no Ulysses degree divides the ranks and holds the
            longest sequence.
    """
    _require(batches, "deepspeed-ulysses", "ulysses")
    require_heads_to_hold(batches)
    found = [s for s in _candidates(batches) if s.heads_degree == s.degree]
    if not found:
        raise UsageError(
            f"no number of ranks that may share heads divides {batches.problem.num_ranks} ranks and holds the longest "
            "sequence"
        )
    return quickest_solver([replace(one, name="deepspeed-ulysses") for one in found], batches, steps=TUNING_STEPS)


def make_usp(batches: GlobalBatches) -> StaticSolver:
    """Make the fastest static solver with a fixed u x r, where the u ranks lie inside a node.

    Raises:
        UsageError: the profile does not price heads, or `--attention` is not `2d`.
    """
    _require(batches, "usp", "2d")
    size = batches.problem.ranks_per_node
    inside = (s for s in _candidates(batches) if size % (s.heads_degree or 1) == 0)
    return quickest_solver([replace(one, name="usp") for one in inside], batches, steps=TUNING_STEPS)


def _candidates(batches: GlobalBatches) -> Iterator[StaticSolver]:
    """Yield every static solver with every Ulysses degree that divides its degree, 1 included."""
    problem, longest = batches.problem, batches.longest_tokens
    assert problem.profile.heads is not None, "a problem splits heads under a profile that prices it"
    for one in static_candidates(problem, longest):
        for heads_degree in (1, *problem.profile.heads.degrees(problem.num_ranks)):
            if one.degree % heads_degree == 0:
                yield replace(one, heads_degree=heads_degree)


def _require(batches: GlobalBatches, name: str, attention: str) -> None:
    if batches.problem.profile.heads is None:
        raise UsageError(f"--solver {name} needs a cost profile with the block heads; 'fcp profile --analytic' has it")
    if batches.problem.attention != attention:
        raise UsageError(f"--solver {name} splits heads; add --attention {attention}")
