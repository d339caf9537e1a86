"""The solver `fcp`: sort a batch, run the compiled search of the plan's sync, write the answer as an Assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import is_kept
from fcp_cli.cost.model import Work, encoder_seconds
from fcp_cli.errors import UsageError
from fcp_cli.machine.interrupts import interrupts_deferred
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.plan.pricing.packs import planned_sequences
from fcp_cli.plan.pricing.speeds import Speeds
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.baselines.static import PACKINGS, StaticSolver, static_degrees
from fcp_cli.planning.batching.batches import batch_of
from fcp_cli.planning.bounds import lower_bound_seconds, simple_bound_seconds
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.static_schedules import quickest
from fcp_cli.planning.compiled.timelines import iteration
from fcp_cli.planning.compiled.waves import microbatch
from fcp_cli.planning.fcp.peer_limit import needs_whole_nodes
from fcp_cli.planning.fcp.pipelines import (
    PipelineStep,
    equal_length_candidates,
    plain_problems,
    quickest_of,
    replicas_of,
)
from fcp_cli.planning.fcp.rank_parts import has_parts
from fcp_cli.planning.fcp.searches import (
    CLOSE_ENOUGH,
    Candidate,
    Found,
    assign_timelines,
    assign_waves,
    best_of,
    regrouped,
)
from fcp_cli.planning.fcp.speeds import assign_at_speeds
from fcp_cli.planning.fcp.tiny import assign_tiny, is_tiny
from fcp_cli.planning.kernel_inputs import by_falling_work, in_batch_order, planner_inputs, repriced, without_splits
from fcp_cli.planning.problem import Assignment, Batch, Problem, whole_budget

_SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
_LESS_TOKENS = 0.8, 0.5  # of a rank's, with which a step is planned again if the gap is large
_FEW_RANKS, _LEFT_OVER = 128, 1 / 8  # up to so many ranks one degree may leave such a share of them over
_FEW_SEQUENCES = 256  # up to which timelines are planned again so
# How full waves to come are (0: all but the last are), and how dear micro-batches, by which waves are rated when a step
# is searched again, and the gap above which it is: where the next ones are less than full, one that leaves few tokens
# more pays no whole wave for them.
_WIDE = 0.02
_RATINGS = (0.92, 1.7, CLOSE_ENOUGH), (0.0, 1.7, _WIDE), (0.92, 1.3, _WIDE), (0.0, 1.3, _WIDE)
_NEVER_PAYS_SECONDS = 1e9  # of a hop: far above any step, and small enough that sums keep their seconds
_Search: TypeAlias = Callable[[IntArray, Sequences, float], Assignment | None]
TWO_LIMITS = "--max-degree forbids rings, which --max-groups and --max-peers limit; give one of them"


def solver_of(problem: Problem, *, max_degree: int | None = None, max_peers: int | None = None) -> FcpSolver:
    """Make the solver for a problem whose batches are not known yet.

    Args:
        problem: the problem to plan for.
        max_degree: 1 forbids rings, and then no sequence may be longer than a rank holds; None: no limit.
        max_peers: most distinct ring neighbours per rank; None: no limit.
    """
    if max_degree is not None and max_peers is not None:
        raise UsageError(TWO_LIMITS)
    if max_degree is not None:
        return _without_rings(problem, max_degree)
    if max_peers is not None:
        require_alike(problem)
        return _with_few_peers(problem, max_peers)
    return FcpSolver(problem=problem, inputs=planner_inputs(problem), degrees=np.array(static_degrees(problem)))


def require_alike(problem: Problem) -> None:
    """Refuse ranks of different speeds, as limits of rings know of none."""
    if problem.rank_speeds is not None:
        raise UsageError(
            "--rank-speeds changes which ranks are in rings, which --max-groups and --max-peers limit; use one of them"
        )


def _without_rings(problem: Problem, max_degree: int) -> FcpSolver:
    if max_degree != 1:
        raise UsageError(f"--max-degree is {max_degree}; 1, which forbids rings, is the only limit")
    inputs = planner_inputs(problem)
    if problem.num_ranks > 1:  # the search knows rings of a catalogue, here of one ring that never pays
        inputs = repriced(planner_inputs(problem, [range(problem.num_ranks)]), hop=_NEVER_PAYS_SECONDS)
    return FcpSolver(problem=problem, inputs=inputs, degrees=np.array([1]), options={"max_degree": 1})


def _with_few_peers(problem: Problem, max_peers: int) -> FcpSolver:
    per_node = problem.ranks_per_node
    whole_nodes = needs_whole_nodes(max_peers, num_ranks=problem.num_ranks, ranks_per_node=per_node)
    degrees = static_degrees(problem)
    if whole_nodes:  # rings of one degree lie side by side from rank 0 on
        degrees = [degree for degree in degrees if per_node % degree == 0 or degree % per_node == 0]
    return FcpSolver(
        problem=problem,
        inputs=planner_inputs(problem, whole_nodes=whole_nodes),
        degrees=np.array(degrees),
        options={"max_peers": max_peers},
    )


def is_compiled(sync: Sync) -> bool:
    """Return whether an earlier run left the search of this sync compiled on disk."""
    return is_kept(iteration.schedule if sync == "iteration" else microbatch.plan)


def winner_of(
    step: StepPlan, problem: Problem, options: Mapping[str, Any], *, manifest: LengthTable | None = None
) -> str | None:
    """Return the name of the candidate that won a planned step, by planning the step again.

    None if that gives a step of other seconds, as under another release or without the manifest's factors, and for
    pipelines, ranks of different speeds and groups chosen on a whole plan, which have other loops.
    """
    if problem.pipeline is not None or problem.rank_speeds is not None or set(options) - {"max_degree", "max_peers"}:
        return None
    rows = np.argsort(step.sequences)
    sequences = planned_sequences(step, manifest).take(rows)
    batch = batch_of(sequences, problem, step=step.step)
    found = solver_of(problem, **options).best(replace(batch, encoder_seconds=None))
    assert found.assignment is not None, "a step was sought below a limit"
    again = assemble(found.assignment, batch, problem, step.bound_seconds)
    # The same candidate gives the same sums, but for rounding.
    return found.name if np.isclose(again.makespan_seconds, step.makespan_seconds, rtol=1e-9) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FcpSolver:
    """Plans whole steps by predicted cost, under either sync.

    Attributes:
        inputs: the ranks, and the groups that rings may use.
        degrees: ascending; those that all groups of a step may have at once.
    """

    problem: Problem
    inputs: PlannerInputs
    degrees: IntArray
    name: str = "fcp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def assign(self, batch: Batch) -> Assignment:
        """Plan one step; see `problem.Solver`."""
        with interrupts_deferred():
            # The encoder's work that waves share is the same for every answer, and no part of the kernels' seconds.
            batch = replace(batch, encoder_seconds=None)
            if self.problem.rank_speeds is not None:
                return self._assign_at_speeds(batch, self.problem.rank_speeds)
            if self.problem.pipeline is not None:
                return quickest_of(self._for_pipelines(batch), batch, self.problem)
            found = self.best(batch)
            assert found.assignment is not None, "a step was sought below a limit"
            return found.assignment

    def compile_ahead(self) -> None:
        """Compile, or load, the inner loops that any later step may need: no step but the first waits for them."""
        plain = replace(self, problem=replace(self.problem, pipeline=None, rank_speeds=None, encoder_balance=None))
        room = self.problem.tokens_per_rank * (1 if self.options.get("max_degree") == 1 else self.problem.num_ranks)
        # A sequence that fills all ranks is bounded in another way.
        # And if there are ranks for several parts, as many as make parts alike.
        for lengths in ([1, 2], [room], *([[1] * self.problem.num_ranks] if has_parts(self.inputs) else [])):
            table = LengthTable(name="a tiny step", length_tokens=np.array(lengths, dtype=np.int64))
            batch = batch_of(table, plain.problem)
            for candidate in plain._candidates(batch, plain._bound(batch.work)):
                candidate.improve(Found())
            StaticSolver(problem=plain.problem, degree=1).assign(batch)
            lower_bound_seconds(batch.work, plain.problem)

    def draft(self, batch: Batch) -> Assignment:
        """Plan one step without the optional candidates: seconds that are hardly longer, in a fraction of the time."""
        if self.problem.rank_speeds is not None or self.problem.pipeline is not None:
            return self.assign(batch)
        with interrupts_deferred():
            batch = replace(batch, encoder_seconds=None)
            found = best_of(self._candidates(batch, _no_bound), _no_bound, Found())
            assert found.assignment is not None, "a step was sought below a limit"
            return found.assignment

    def best(self, batch: Batch) -> Found:
        """Return the quickest answer on ranks of one speed without pipelines, and the candidate that gave it."""
        bound = self._bound(batch.work)
        return best_of(self._candidates(batch, bound), bound, Found())

    def _bound(self, work: Work) -> Callable[[], float]:
        return cache(partial(lower_bound_seconds, work, self.problem))

    def _candidates(self, batch: Batch, bound: Callable[[], float]) -> Iterator[Candidate]:
        """Yield everything that is tried for a step."""
        yield from self._searches(batch)
        yield Candidate("one degree", partial(self._one_degree, batch))
        if self.problem.attention == "2d":  # a plan of rings may be quicker than the greedy search among all ways
            rings = replace(self, inputs=without_splits(self.inputs))
            nested = partial(best_of, rings._searches(batch, "rings, "), bound)
            yield Candidate("rings", nested, CLOSE_ENOUGH)
        for name, work in self._perturbed_work(batch.work):
            yield Candidate(name, partial(self._perturbed, name, replace(batch, work=work), batch), CLOSE_ENOUGH)
        if self.problem.sync == "microbatch":
            order, sequences = by_falling_work(batch.work)
            recomputes = self.inputs.prices.again.any()
            # With recomputation, waves to come are rated by what their tokens cost, however full they are.
            for fill, dearer, above_gap in (rating for rating in _RATINGS if not (recomputes and rating[0])):
                name = f"waves, if later ones were {fill or 1:.0%} full and micro-batches {dearer:g} times as dear"
                again = partial(self._rated_otherwise, batch, order, sequences, fill, dearer, name)
                yield Candidate(name, again, above_gap)
            if not has_parts(self.inputs):  # parts that are alike have waves of all ranks
                yield Candidate("regrouped", partial(self._regrouped, batch, order, sequences), CLOSE_ENOUGH)
        if not self.options and is_tiny(batch, self.problem):
            yield Candidate("exact", partial(self._exact, batch), 0.0)

    def _searches(self, batch: Batch, prefix: str = "") -> Iterator[Candidate]:
        """Yield the searches of these inputs for the step."""
        order, sequences = by_falling_work(batch.work)
        # The compiled core knows no seconds after the last micro-batch.
        closing = self.problem.profile.step.closing_seconds(self.problem.sync)

        def candidate(name: str, search: _Search, above_gap: float | None = None) -> Candidate:
            def improve(found: Found) -> Found:
                answer = search(order, sequences, found.seconds - closing)
                return found.quicker(prefix + name, answer, batch, self.problem)

            return Candidate(prefix + name, improve, above_gap)

        if self.problem.sync == "iteration":
            yield candidate("timelines", partial(self._timelines, batch.work))
        yield candidate("waves", self._waves)
        # Under `ulysses` the widest group may need every token.
        reduced = () if self.problem.attention == "ulysses" else reduced_budgets(self.inputs, sequences)
        for name, inputs in reduced:
            yield candidate(name, replace(self, inputs=inputs)._again, CLOSE_ENOUGH)

    def _timelines(self, work: Work, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        # If a step is known, gains of more than a tenth are not looked for: attempts far below it would all fail.
        least = simple_bound_seconds(work, self.problem) if limit == np.inf else 0.9 * limit
        return assign_timelines(least, order, sequences, self.inputs, limit)

    def _waves(self, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        waves = assign_waves(order, sequences, self.inputs, limit)
        if waves is None or self.problem.sync == "microbatch":
            return waves
        return _without_waves(waves)  # a valid order of timelines, too

    def _again(self, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        """Search these inputs, which are others than the problem's, for fewer seconds than the limit."""
        if self.problem.sync == "microbatch":
            return assign_waves(order, sequences, self.inputs, limit)
        if len(order) > _FEW_SEQUENCES:
            return None
        even = float(sequences.work.sum()) / self.inputs.num_ranks + self.inputs.prices.beta
        return assign_timelines(max(even, 0.9 * limit), order, sequences, self.inputs)

    def _perturbed(self, name: str, perturbed: Batch, batch: Batch, found: Found) -> Found:
        """Plan other work from the start; the answer counts by the real one."""
        answer = best_of(self._searches(perturbed, f"{name}, "), self._bound(perturbed.work), Found())
        return found.quicker(answer.name, answer.assignment, batch, self.problem)

    def _exact(self, batch: Batch, found: Found) -> Found:
        return found.quicker("exact", assign_tiny(batch, self.problem), batch, self.problem)

    def _assign_at_speeds(self, batch: Batch, speeds: Speeds) -> Assignment:
        """Plan one step on ranks of different speeds; waves are a valid order of timelines, too."""
        first = assign_at_speeds(batch, self.problem, speeds, self._assign_alike)
        if self.problem.sync == "microbatch" or self.problem.pipeline is not None:
            return first
        in_waves = replace(self, problem=replace(self.problem, sync="microbatch"))

        def waves(found: Found) -> Found:
            other = _without_waves(in_waves._assign_at_speeds(batch, speeds))
            return found.quicker("waves", other, batch, self.problem)

        start = Found(first, makespan_seconds(first, batch, self.problem), "timelines")
        found = best_of([Candidate("waves", waves, CLOSE_ENOUGH)], self._bound(batch.work), start)
        return found.assignment or first

    def _assign_alike(self, num_ranks: int, dearer_hop_seconds: float, batch: Batch) -> Assignment:
        """Plan one step as if all ranks, or as there are some fewer of them, were as fast as the profile says."""
        alike = replace(self.problem, num_ranks=num_ranks, rank_speeds=None)
        is_whole = num_ranks == self.problem.num_ranks
        solver = self if is_whole else solver_of(alike, max_degree=self.options.get("max_degree"))
        inputs = repriced(solver.inputs, hop=solver.inputs.prices.hop + dearer_hop_seconds)
        return replace(solver, problem=alike, inputs=inputs).assign(batch)

    def _perturbed_work(self, work: Work) -> Iterator[tuple[str, Work]]:
        """Yield work by which the greedy search goes other ways."""
        encoder = encoder_seconds(work, self.problem.profile)
        if self.problem.sync == "microbatch" and self.problem.profile.step.lockstep and encoder.any():
            # Waves wait for the slowest encoder and then for the slowest rest: more even in the one, or in the other.
            yield "even without encoder", replace(work, linear_seconds=work.linear_seconds - encoder)
            yield "even encoder", replace(work, linear_seconds=work.linear_seconds + encoder)

    def _rated_otherwise(
        self,
        batch: Batch,
        order: IntArray,
        sequences: Sequences,
        fill: float,
        dearer: float,
        name: str,
        found: Found,
    ) -> Found:
        """Search for waves by another rating: if later waves were less full, and micro-batches dearer."""
        beta = self.inputs.prices.beta
        rated = repriced(self.inputs._replace(fill=fill), beta=dearer * beta)
        limit = found.seconds - self.problem.profile.step.closing_seconds(self.problem.sync)
        # The search pays the dearer price in each wave; it needs no more waves for that.
        if found.assignment is not None:
            limit += (int(found.assignment.wave.max()) + 1) * (dearer - 1.0) * beta
        return found.quicker(name, assign_waves(order, sequences, rated, limit), batch, self.problem)

    def _regrouped(self, batch: Batch, order: IntArray, sequences: Sequences, found: Found) -> Found:
        """Plan pairs of waves again: of the quickest step so far, or of the first if there is none yet."""
        assignment = found.assignment or assign_waves(order, sequences, self.inputs)
        assert assignment is not None, "a step was sought below a limit"
        other = regrouped(assignment, order, sequences, self.inputs)
        return found.quicker(f"{found.name}, regrouped", other, batch, self.problem)

    def _for_pipelines(self, batch: Batch) -> Iterator[PipelineStep]:
        """Yield steps for pipelines: of micro-batches of similar length, and as planned without stages."""
        if self.options.get("max_degree") != 1:
            yield from equal_length_candidates(batch, self.problem, replicas_of(self.problem, self.inputs))
        for plain in plain_problems(self.problem, int(batch.work.tokens.max())):
            tokens = plain.tokens_per_rank
            # Prices stay, and so do the tables of ways: they keep what is quickest up to more tokens.
            inputs = self.inputs._replace(tokens_per_rank=tokens, shared_tokens=tokens)
            found = FcpSolver(problem=plain, inputs=inputs, degrees=self.degrees).assign(batch)
            yield PipelineStep.of(found, batch, self.problem)

    def _one_degree(self, batch: Batch, found: Found) -> Found:
        """Try the best step of one degree; rings keep to the allowed groups."""
        seconds = found.seconds - self.problem.profile.step.closing_seconds(self.problem.sync)
        # In the order of the batch, as `StaticSolver` lays the winner out: ties are broken by position.
        chosen, sequences, degrees, ranks = None, in_batch_order(batch.work), self.degrees, self.problem.num_ranks
        if not self.options and ranks <= _FEW_RANKS:  # the ranks that a degree leaves over may wait
            degrees = np.array([degree for degree in range(1, ranks + 1) if ranks % degree <= _LEFT_OVER * ranks])
        # Packs shared out in turns are an order of timelines, too; the reverse does not hold.
        for sync in _SYNCS if self.problem.sync == "iteration" else _SYNCS[1:]:
            least, degree, packing = quickest(seconds, degrees, sync == "microbatch", sequences, self.inputs)
            if degree:
                problem = replace(self.problem, sync=sync)
                seconds, chosen = least, StaticSolver(problem=problem, degree=degree, packing=PACKINGS[packing])
        if chosen is None:
            return found
        assignment = chosen.assign(batch)
        if self.problem.sync == "iteration":
            assignment = _without_waves(assignment)
        return found.quicker("one degree", assignment, batch, self.problem)


def _no_bound() -> float:
    """Return a bound that any answer meets, so that no optional candidate is tried."""
    return np.inf


def reduced_budgets(inputs: PlannerInputs, sequences: Sequences) -> Iterator[tuple[str, PlannerInputs]]:
    """Yield inputs with fewer tokens a rank, whose steps are legal with more, too.

    The searches are greedy, and may find better ways if they have less; so that more does not make a step slower,
    these steps compete.
    """
    ranks, tokens, longest = inputs.num_ranks, inputs.tokens_per_rank, int(sequences.tokens.max())
    budgets = {f"{share:g} of the token budget": int(share * tokens) for share in _LESS_TOKENS}
    if inputs.shared_tokens < tokens:
        budgets = {"as few tokens as recomputation pays for": inputs.shared_tokens, **budgets}
    for name, budget in budgets.items():
        fewer = whole_budget(budget, inputs.padding or None)
        # A step that one rank holds with fewer tokens, too, would be the same again.
        if fewer and longest <= ranks * fewer and (longest > fewer or int(sequences.tokens.sum()) > fewer):
            yield name, inputs._replace(tokens_per_rank=fewer)


def _without_waves(assignment: Assignment) -> Assignment:
    """Return micro-batches in the order of their waves, in which no rank waits for all others."""
    return replace(assignment, wave=np.full_like(assignment.wave, -1))
