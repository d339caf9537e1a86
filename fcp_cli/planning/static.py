"""`static`: one well-tuned degree for the whole plan, as users of Megatron-LM and DeepSpeed run today.

The ranks are cut into contiguous groups of one degree. The sequences of a global batch are packed up to a group's
budget, and the packs are dealt to the groups. Two settings that a careful user tunes are tuned once per plan, with the
cost model that judges all solvers: the degree (any divisor of the ranks that holds the longest sequence), and whether
packs are filled up (fewest packs) or evened out (all groups get packs of similar size).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, spread_steps
from fcp_cli.planning.compiled.static_schedules import laid_out
from fcp_cli.planning.drafts import members_by_pack, quickest_solver
from fcp_cli.planning.kernel_inputs import in_batch_order, planner_inputs
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on

Packing = Literal["full", "even", "level"]
PACKINGS: Final[tuple[Packing, ...]] = ("full", "even", "level")  # as `static_schedules` numbers them
TUNING_STEPS = 32  # evenly spaced steps on which degree and packing are tuned


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticSolver:
    """Solver that plans every step on one degree.

    Attributes:
        problem: the problem to plan for.
        degree: ranks of every group; a divisor of the ranks, or the left-over ranks idle.
        packing: `full` fills packs up, `even` spreads tokens evenly, `level` spreads work over the groups first.
        heads_degree: Ulysses degree; None: the fastest that the problem allows.
        name: the name in the registry of solvers.
    """

    problem: Problem
    degree: int
    packing: Packing = "full"
    heads_degree: int | None = None
    name: str = "static"

    @property
    def options(self) -> Mapping[str, Any]:
        heads = {} if self.heads_degree is None else {"heads_degree": self.heads_degree}
        return {"degree": self.degree, **heads, "packing": self.packing}

    def assign(self, batch: Batch) -> Assignment:
        """Pack the sequences and deal the packs to the groups, the longest first."""
        sequences = in_batch_order(work_on(batch.work, self.degree, self.problem))
        machine = planner_inputs(self.problem)
        waves = self.problem.sync == "microbatch"
        packing = PACKINGS.index(self.packing)
        packs, by, group, turn = laid_out(packing, self.degree, waves, sequences, machine)
        offsets, members = members_by_pack(packs.of, packs.number)
        if waves:  # packs come in the order of dealing, an assignment by wave
            ascending = np.argsort(turn, kind="stable")
            by, group, turn = by[ascending], group[ascending], turn[ascending]
        return Assignment(
            wave=(turn if waves else np.full(packs.number, -1)).astype(np.int32),
            rank_offsets=np.arange(packs.number + 1, dtype=np.int64) * self.degree,
            ranks=(group[:, None] * self.degree + np.arange(self.degree)).ravel().astype(np.int32),
            member_offsets=offsets_of(np.diff(offsets)[by]),
            members=np.concatenate([members[offsets[pack] : offsets[pack + 1]] for pack in by.tolist()]),
            heads_degree=None
            if self.heads_degree is None
            else np.full(packs.number, self.heads_degree, dtype=np.int32),
        )

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of the step."""
        return makespan_seconds(self.assign(batch), batch, self.problem)


def make_solver(batches: GlobalBatches) -> StaticSolver:
    """Make the static solver with the least predicted time over the plan, or over a sample of its steps."""
    longest = batches.longest_tokens
    return quickest_solver(static_candidates(batches.problem, longest), batches, steps=TUNING_STEPS)


def best_static(problem: Problem, longest_tokens: int, batches: Sequence[Batch]) -> tuple[StaticSolver, float]:
    """Return the fastest static solver on these batches, and its seconds on all of them.

    It is tuned on at most `TUNING_STEPS` batches. Its groups are always rings, as users run them today.

    Args:
        problem: the problem to plan for.
        longest_tokens: longest sequence that the degree must hold.
        batches: the batches to tune and measure on.
    """
    tuned = [batches[i] for i in spread_steps(len(batches), TUNING_STEPS)]
    candidates = static_candidates(replace(problem, attention=None), longest_tokens)
    best = min(candidates, key=lambda one: sum(map(one.seconds, tuned)))
    return best, sum(map(best.seconds, batches))


def static_candidates(problem: Problem, longest_tokens: int) -> Iterator[StaticSolver]:
    """Yield solvers for every degree that divides the ranks and holds the longest sequence, with both packings."""
    for degree in static_degrees(problem):
        if degree * problem.tokens_per_rank >= longest_tokens:
            yield StaticSolver(problem=problem, degree=degree, packing="full")
            yield StaticSolver(problem=problem, degree=degree, packing="even")


def static_degrees(problem: Problem) -> list[int]:
    """Return all degrees that divide the ranks, ascending."""
    return [degree for degree in range(1, problem.num_ranks + 1) if problem.num_ranks % degree == 0]


def holding_degrees(batches: GlobalBatches) -> list[int]:
    """Return all degrees that divide the ranks and hold the longest sequence, ascending; never empty."""
    held = batches.problem.tokens_per_rank
    return [degree for degree in static_degrees(batches.problem) if degree * held >= batches.longest_tokens]
