"""The solver `fcp`: sorts a batch, runs the compiled searches of the plan's sync and returns the fastest Assignment."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, chain, product
from typing import Any, TypeAlias

import numpy as np

from fcp_cli.cost.model import Work, encoder_seconds
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import PlacedPacks, microbatch_prices, pack_work, planned_sequences
from fcp_cli.plan.setup import Speeds
from fcp_cli.plan.step import StepPlan, offsets_of
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of, spread_steps
from fcp_cli.planning.bounds import lower_bound_seconds, simple_bound_seconds
from fcp_cli.planning.compiled import timelines, waves
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.static_schedules import quickest
from fcp_cli.planning.groups import choose_groups, needs_whole_nodes
from fcp_cli.planning.kernel_inputs import by_falling_work, in_batch_order, planner_inputs, repriced, without_splits
from fcp_cli.planning.pipelines import PipelineStep, equal_length_candidates, plain_problems, quickest_of, replicas_of
from fcp_cli.planning.problem import Assignment, Batch, Problem, whole_budget
from fcp_cli.planning.searches import (
    CLOSE_ENOUGH,
    NOTHING,
    Candidate,
    Found,
    assign_timelines,
    assign_waves,
    best_of,
    has_parts,
    regrouped,
)
from fcp_cli.planning.speeds import assign_at_speeds
from fcp_cli.planning.static import PACKINGS, StaticSolver, static_degrees
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import is_kept, wait_silently
from fcp_cli.util.console import note
from fcp_cli.util.pool import beside
from fcp_cli.util.processes import interrupts_deferred
from fcp_cli.util.words import duration

_SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
_LESS_TOKENS = 0.8, 0.5  # shares of the token budget with which a step is replanned if the gap is large
_FEW_RANKS, _LEFT_OVER = 128, 1 / 8  # up to 128 ranks, a single degree may idle this share of them
_FEW_SEQUENCES = 256  # up to which timelines are replanned with a smaller token budget
# Waves are also rated as if later ones were less full and micro-batches dearer, so that a wave that leaves a few more
# tokens is not charged a whole further wave for them.
_FILL, _DEARER = 0.92, 1.7
_DEARER_RINGS = 1.5
_NEVER_PAYS_SECONDS = 1e9  # per hop: far above any step, yet small enough that float sums keep their precision
_Search: TypeAlias = Callable[[IntArray, Sequences, float], Assignment | None]
TWO_LIMITS = "--max-degree forbids rings, which --max-groups and --max-peers limit; give one of them"


def solver_of(problem: Problem, *, max_degree: int | None = None, max_peers: int | None = None) -> FcpSolver:
    """Make the solver for a problem whose batches are not known yet.

    Args:
        problem: the problem to plan for.
        max_degree: 1 forbids rings, and every sequence must fit into a rank; None: no limit.
        max_peers: most distinct ring neighbours per rank; None: no limit.

    Raises:
        UsageError: both limits are given, or one cannot be met.
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
    """Raise UsageError for ranks of different speeds, which limits on rings do not support."""
    if problem.rank_speeds is not None:
        raise UsageError(
            "--rank-speeds changes which ranks are in rings, which --max-groups and --max-peers limit; use one of them"
        )


def _without_rings(problem: Problem, max_degree: int) -> FcpSolver:
    if max_degree != 1:
        raise UsageError(f"--max-degree is {max_degree}; 1, which forbids rings, is the only limit")
    inputs = planner_inputs(problem)
    if problem.num_ranks > 1:  # the search cannot forbid rings, so the catalogue holds one that never pays
        inputs = repriced(planner_inputs(problem, [range(problem.num_ranks)]), hop=_NEVER_PAYS_SECONDS)
    return FcpSolver(problem=problem, inputs=inputs, degrees=np.array([1]), options={"max_degree": 1})


def _with_few_peers(problem: Problem, max_peers: int) -> FcpSolver:
    per_node = problem.ranks_per_node
    whole_nodes = needs_whole_nodes(max_peers, num_ranks=problem.num_ranks, ranks_per_node=per_node)
    degrees = static_degrees(problem)
    if whole_nodes:  # a single degree tiles the ranks from rank 0: other degrees would straddle nodes
        degrees = [degree for degree in degrees if per_node % degree == 0 or degree % per_node == 0]
    return FcpSolver(
        problem=problem,
        inputs=planner_inputs(problem, whole_nodes=whole_nodes),
        degrees=np.array(degrees),
        options={"max_peers": max_peers},
    )


def is_compiled(sync: Sync) -> bool:
    """Return whether the compiled search of this sync is cached on disk."""
    return is_kept(timelines.schedule if sync == "iteration" else waves.planned)


def compile_missing(problems: Iterable[Problem]) -> None:
    """Compile the searches that these problems need and this machine lacks; say so before and after."""
    missing = {one.sync: one for one in problems if not is_compiled(one.sync)}
    if missing:
        note("compiling the planner, once on this machine: about a minute of CPU time")
        began = time.perf_counter()
        with beside(_compile, list(missing.values()), True):
            _compile(list(missing.values()))
        note(f"compiled the planner in {duration(time.perf_counter() - began)}")


def _compile(problems: Sequence[Problem], backwards: bool = False) -> None:
    """Compile, or load from disk, all kernels that a step of any problem may need.

    Two processes that begin at opposite ends share the work, since each loads what the other has compiled.
    """
    wait_silently()
    ahead = [solver_of(problem).parts_to_compile() for problem in problems]
    first, *searches = chain.from_iterable(searches for searches, _ in ahead)
    parts = [first, *(bound for _, bounds in ahead for bound in bounds), *searches]
    for compile_part in reversed(parts) if backwards else parts:
        compile_part()


def winner_of(
    step: StepPlan, problem: Problem, options: Mapping[str, Any], *, manifest: LengthTable | None = None
) -> str | None:
    """Replan a step and return the name of the winning candidate.

    Return None if the new step has another makespan, e.g. under another release or without the manifest's factors.
    Also None for pipelines, ranks of different speeds and `max_groups`, which do not run the loop over candidates.
    """
    if problem.pipeline is not None or problem.rank_speeds is not None or set(options) - {"max_degree", "max_peers"}:
        return None
    rows = np.argsort(step.sequences)
    sequences = planned_sequences(step, manifest).take(rows)
    batch = batch_of(sequences, problem, step=step.step)
    found = solver_of(problem, **options).best(replace(batch, encoder_seconds=None))
    assert found.assignment is not None, "a step was sought below a limit"
    again = assemble(found.assignment, batch, problem, step.bound_seconds)
    # The same candidate gives the same sums, up to rounding.
    return found.name if np.isclose(again.makespan_seconds, step.makespan_seconds, rtol=1e-9) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FcpSolver:
    """Plans whole steps by predicted cost, under either sync.

    Attributes:
        problem: the problem to plan for.
        inputs: the ranks, and the groups that rings may use.
        degrees: degrees that all groups of a step may share, ascending.
        name: the name in the registry of solvers.
        options: the limits on rings, for the plan's metadata.
    """

    problem: Problem
    inputs: PlannerInputs
    degrees: IntArray
    name: str = "fcp"
    options: Mapping[str, Any] = field(default_factory=dict)

    def assign(self, batch: Batch) -> Assignment:
        """Plan one step; see `problem.Solver`."""
        with interrupts_deferred():
            # Shared encoder work is the same for every answer and unknown to the kernels.
            batch = replace(batch, encoder_seconds=None)
            if self.problem.rank_speeds is not None:
                return self._assign_at_speeds(batch, self.problem.rank_speeds)
            if self.problem.pipeline is not None:
                return quickest_of(self._for_pipelines(batch), batch, self.problem)
            found = self.best(batch)
            assert found.assignment is not None, "a step was sought below a limit"
            return found.assignment

    @property
    def _widest(self) -> int:
        """Most ranks that a ring may have."""
        return 1 if self.options.get("max_degree") == 1 else self.problem.num_ranks

    def compile_ahead(self) -> None:
        """Compile, or load from disk, all kernels that a step may need, so that no later step waits for them."""
        for compile_part in chain(*self.parts_to_compile()):
            compile_part()

    def parts_to_compile(self) -> tuple[list[Callable[[], object]], list[Callable[[], float]]]:
        """Return calls that run all kernels that a step may need: searches, and bounds."""
        plain = replace(self, problem=replace(self.problem, pipeline=None, rank_speeds=None, encoder_balance=None))
        room = self.problem.tokens_per_rank * self._widest
        searches: list[Callable[[], object]] = []
        bounds: list[Callable[[], float]] = []
        # One sequence that fills all ranks takes another path of the bounds; one sequence per rank, if there are
        # ranks for several parts, reaches the kernels that plan in parts.
        for lengths in ([1, 2], [room], *([[1] * self.problem.num_ranks] if has_parts(self.inputs) else [])):
            table = LengthTable(name="a tiny step", length_tokens=np.array(lengths, dtype=np.int64))
            batch = batch_of(table, plain.problem)
            bounds.append(plain._bound(batch.work))
            searches += [partial(one.assign, NOTHING) for one in plain._candidates(batch, bounds[-1])]
            searches.append(partial(plain._price_static, batch))
        return searches, bounds

    def draft(self, batch: Batch) -> Assignment:
        """Plan one step without the optional candidates: hardly slower, in a fraction of the planning time."""
        if self.problem.rank_speeds is not None or self.problem.pipeline is not None:
            return self.assign(batch)
        with interrupts_deferred():
            batch = replace(batch, encoder_seconds=None)
            found = best_of(self._candidates(batch, _no_bound), self._price(batch), _no_bound)
            assert found.assignment is not None, "a step was sought below a limit"
            return found.assignment

    def best(self, batch: Batch) -> Found:
        """Return the fastest answer of all candidates, for ranks of one speed and no pipeline."""
        bound = self._bound(batch.work)
        return best_of(self._candidates(batch, bound), self._price(batch), bound)

    def _price(self, batch: Batch) -> Callable[[Assignment], float]:
        return partial(makespan_seconds, batch=batch, problem=self.problem)

    def _price_static(self, batch: Batch) -> float:
        return self._price(batch)(StaticSolver(problem=self.problem, degree=1).assign(batch))

    def _bound(self, work: Work) -> Callable[[], float]:
        return cache(partial(lower_bound_seconds, work, self.problem))

    def _candidates(self, batch: Batch, bound: Callable[[], float]) -> Iterator[Candidate]:
        """Yield all candidates for a step, in the order of their trials."""
        yield from self._searches(batch)
        yield Candidate("one degree", partial(self._one_degree, batch))
        if self.problem.attention == "2d":  # the greedy search is not monotone: rings alone may give a faster plan
            rings = replace(self, inputs=without_splits(self.inputs))
            nested = partial(best_of, rings._searches(batch), self._price(batch), bound)
            yield Candidate("rings", lambda found: nested(found).assignment, CLOSE_ENOUGH)
        for name, work in self._perturbed_work(batch.work):
            perturbed = partial(self._from_scratch, replace(batch, work=work))
            yield Candidate(name, perturbed, CLOSE_ENOUGH)
        if self.problem.sync == "microbatch":
            order, sequences = by_falling_work(batch.work)
            if not self.inputs.prices.again.any():
                rated = partial(self._rated_otherwise, order, sequences)
                yield Candidate("waves, if later ones were less full", rated, CLOSE_ENOUGH)
            else:  # the cost of their tokens rates later waves, so a fill changes nothing
                dearer = partial(self._with_dearer_rings, order, sequences)
                yield Candidate("waves, if rings cost more", dearer, CLOSE_ENOUGH)
            if not has_parts(self.inputs):  # a pair of waves spans all ranks: too many, if a step is cut into parts
                yield Candidate("regrouped", partial(self._regrouped, order, sequences), CLOSE_ENOUGH)
        if not self.options and is_tiny(batch, self.problem):
            yield Candidate("exact", lambda found: assign_tiny(batch, self.problem), 0.0)

    def _searches(self, batch: Batch) -> Iterator[Candidate]:
        """Yield the searches of these inputs for the step."""
        order, sequences = by_falling_work(batch.work)
        # The kernels do not know the seconds after the last micro-batch.
        closing = self.problem.profile.step.closing_seconds(self.problem.sync)

        def candidate(name: str, search: _Search, above_gap: float | None = None) -> Candidate:
            return Candidate(name, lambda found: search(order, sequences, found.seconds - closing), above_gap)

        if self.problem.sync == "iteration":
            yield candidate("timelines", partial(self._timelines, batch.work))
        yield candidate("waves", self._waves)
        # Under `ulysses` the widest group may need the whole budget for the longest sequence.
        reduced = () if self.problem.attention == "ulysses" else reduced_budgets(self.inputs, sequences)
        for name, inputs in reduced:
            yield candidate(name, replace(self, inputs=inputs)._again, CLOSE_ENOUGH)

    def _timelines(self, work: Work, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        # With a known step, search no lower than 0.9 of it: such targets would all fail.
        least = simple_bound_seconds(work, self.problem) if limit == np.inf else 0.9 * limit
        return assign_timelines(least, order, sequences, self.inputs, limit)

    def _waves(self, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        waves = assign_waves(order, sequences, self.inputs, limit)
        if waves is None or self.problem.sync == "microbatch":
            return waves
        return _without_waves(waves)  # waves are also a valid order of timelines

    def _again(self, order: IntArray, sequences: Sequences, limit: float) -> Assignment | None:
        """Search with these inputs, which differ from the problem's, for a makespan below the limit."""
        if self.problem.sync == "microbatch":
            return assign_waves(order, sequences, self.inputs, limit)
        if len(order) > _FEW_SEQUENCES:
            return None
        even = float(sequences.work.sum()) / self.inputs.num_ranks + self.inputs.prices.beta
        return assign_timelines(max(even, 0.9 * limit), order, sequences, self.inputs)

    def _from_scratch(self, perturbed: Batch, found: Found) -> Assignment | None:
        """Plan perturbed work without regard to the fastest answer, whose price is of the real work."""
        return best_of(self._searches(perturbed), self._price(perturbed), self._bound(perturbed.work)).assignment

    def _assign_at_speeds(self, batch: Batch, speeds: Speeds) -> Assignment:
        """Plan one step on ranks of different speeds; under `iteration` waves compete, too."""
        first = assign_at_speeds(batch, self.problem, speeds, self._assign_alike)
        if self.problem.sync == "microbatch" or self.problem.pipeline is not None:
            return first
        in_waves = replace(self, problem=replace(self.problem, sync="microbatch"))
        candidates = (
            Candidate("timelines", lambda found: first),
            Candidate("waves", lambda found: _without_waves(in_waves._assign_at_speeds(batch, speeds)), CLOSE_ENOUGH),
        )
        return best_of(candidates, self._price(batch), self._bound(batch.work)).assignment or first

    def _assign_alike(self, num_ranks: int, dearer_hop_seconds: float, batch: Batch) -> Assignment:
        """Plan one step on `num_ranks` ranks of speed 1, with dearer ring hops."""
        alike = replace(self.problem, num_ranks=num_ranks, rank_speeds=None)
        is_whole = num_ranks == self.problem.num_ranks
        solver = self if is_whole else solver_of(alike, max_degree=self.options.get("max_degree"))
        inputs = repriced(solver.inputs, hop=solver.inputs.prices.hop + dearer_hop_seconds)
        return replace(solver, problem=alike, inputs=inputs).assign(batch)

    def _perturbed_work(self, work: Work) -> Iterator[tuple[str, Work]]:
        """Yield perturbed work that leads the greedy search to other plans."""
        encoder = encoder_seconds(work, self.problem.profile)
        if self.problem.sync == "microbatch" and self.problem.profile.step.lockstep and encoder.any():
            # A wave waits for the slowest encoder, then for the slowest decoder: balance either of them better.
            yield "even without encoder", replace(work, linear_seconds=work.linear_seconds - encoder)
            yield "even encoder", replace(work, linear_seconds=work.linear_seconds + encoder)

    def _rated_otherwise(self, order: IntArray, sequences: Sequences, found: Found) -> Assignment | None:
        """Search for waves as if later waves were less full and micro-batches dearer; see `_FILL`."""
        beta = self.inputs.prices.beta
        # A further micro-batch takes its host, too.
        more = (_DEARER - 1.0) * max(beta, self.inputs.prices.host)
        rated = repriced(self.inputs._replace(fill=_FILL), beta=beta + more)
        limit = found.seconds - self.problem.profile.step.closing_seconds(self.problem.sync)
        # Each wave pays the dearer price, so the limit rises by that much for as many waves.
        if found.assignment is not None:
            limit += (int(found.assignment.wave.max()) + 1) * more
        return assign_waves(order, sequences, rated, limit)

    def _with_dearer_rings(self, order: IntArray, sequences: Sequences, found: Found) -> Assignment | None:
        """Search for waves as if rings cost more, which makes ranks recompute instead."""
        p = self.inputs.prices
        rings = repriced(self.inputs, ring=_DEARER_RINGS * p.ring, hop=_DEARER_RINGS * p.hop)
        return assign_waves(order, sequences, rings)

    def _regrouped(self, order: IntArray, sequences: Sequences, found: Found) -> Assignment | None:
        """Replan pairs of waves of the fastest step so far, or of a new one if there is none."""
        assignment = found.assignment or assign_waves(order, sequences, self.inputs)
        assert assignment is not None, "a step was sought below a limit"
        return regrouped(assignment, order, sequences, self.inputs)

    def _for_pipelines(self, batch: Batch) -> Iterator[PipelineStep]:
        """Yield steps for pipelines: with micro-batches of similar duration, and as planned without stages."""
        if self.options.get("max_degree") != 1:
            yield from equal_length_candidates(batch, self.problem, replicas_of(self.problem, self.inputs))
        for plain in plain_problems(self.problem, int(batch.work.tokens.max()), self._widest):
            tokens = plain.tokens_per_rank
            # The tables of ways remain valid: they hold every way that is fastest for any number of tokens up to more.
            inputs = self.inputs._replace(tokens_per_rank=tokens, shared_tokens=tokens)
            found = replace(self, problem=plain, inputs=inputs).assign(batch)
            yield PipelineStep.of(found, batch, self.problem)

    def _one_degree(self, batch: Batch, found: Found) -> Assignment | None:
        """Return the fastest step of a single degree, on allowed groups."""
        seconds = found.seconds - self.problem.profile.step.closing_seconds(self.problem.sync)
        # In batch order, since ties are broken by position and `StaticSolver` lays the winner out in that order.
        chosen, sequences, degrees, ranks = None, in_batch_order(batch.work), self.degrees, self.problem.num_ranks
        if not self.options and ranks <= _FEW_RANKS:  # the ranks that a degree leaves over may idle
            degrees = np.array([degree for degree in range(1, ranks + 1) if ranks % degree <= _LEFT_OVER * ranks])
        # Waves are also a valid order of timelines, but not the reverse.
        for sync in _SYNCS if self.problem.sync == "iteration" else _SYNCS[1:]:
            least, degree, packing = quickest(seconds, degrees, sync == "microbatch", sequences, self.inputs)
            if degree:
                problem = replace(self.problem, sync=sync)
                seconds, chosen = least, StaticSolver(problem=problem, degree=degree, packing=PACKINGS[packing])
        if chosen is None:
            return None
        assignment = chosen.assign(batch)
        return _without_waves(assignment) if self.problem.sync == "iteration" else assignment


def _no_bound() -> float:
    """Return an infinite bound, so that no optional candidate is tried."""
    return np.inf


def reduced_budgets(inputs: PlannerInputs, sequences: Sequences) -> Iterator[tuple[str, PlannerInputs]]:
    """Yield inputs with a smaller token budget; their steps are valid under the full one.

    The greedy searches may find a faster step with a smaller budget. These steps compete, so that a larger budget does
    not make a plan slower.
    """
    ranks, tokens, longest = inputs.num_ranks, inputs.tokens_per_rank, int(sequences.tokens.max())
    budgets = {f"{share:g} of the token budget": int(share * tokens) for share in _LESS_TOKENS}
    if inputs.shared_tokens < tokens:
        budgets = {"as few tokens as recomputation pays for": inputs.shared_tokens, **budgets}
    for name, budget in budgets.items():
        fewer = whole_budget(budget, inputs.padding or None)
        # Skip a budget under which one rank still holds the whole batch: the step would be the same.
        if fewer and longest <= ranks * fewer and (longest > fewer or int(sequences.tokens.sum()) > fewer):
            yield name, inputs._replace(tokens_per_rank=fewer)


def _without_waves(assignment: Assignment) -> Assignment:
    """Return the assignment with its micro-batches in the same order, but without waves."""
    return replace(assignment, wave=np.full_like(assignment.wave, -1))


# The solver `fcp` for the batches of a plan: its options, groups chosen under a limit, and the price of a limit.

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
        # Degrees whose rings can cover all ranks side by side.
        firsts = {degree: range(0, problem.num_ranks, degree) for degree in static_degrees(problem)}
        tiled = [d for d in firsts if d == 1 or all(range(first, first + d) in groups for first in firsts[d])]
        inputs = planner_inputs(problem, groups)
        return FcpSolver(problem=problem, inputs=inputs, degrees=np.array(tiled), options=options)

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


# Exact search for tiny steps: few sequences on few ranks, with every possible wave tried.
#
# Waves serve both syncs: on 4 to 16 ranks an exact search of timelines gained nothing more on any family of lengths.

_CHOICES = 1700  # packs x choices of ranks for each; a step of that many takes some hundredths of a second
_INSIDE, _ACROSS = 0, 1

_Groups: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # of a wave: (mask of sequences, ranks used per node)


def is_tiny(batch: Batch, problem: Problem) -> bool:
    """Return whether an exact search is affordable, e.g. 7 sequences on a node of 8 ranks, or 6 on two nodes of 4."""
    if len(batch.rows) > 10:  # never affordable, and 2^n of a large batch is a huge integer
        return False
    return bool(2 ** len(batch.rows) * math.prod(size + 1 for size in _node_sizes(problem)) <= _CHOICES)


def assign_tiny(batch: Batch, problem: Problem) -> Assignment:
    """Return the fastest step of waves; under `iteration` all its wave numbers are -1.

    Args:
        batch: a batch of few sequences; see `is_tiny`.
        problem: the problem, without limits on rings.
    """
    seconds, sizes = _prices(batch, problem).tolist(), _node_sizes(problem)
    floor = problem.profile.step.floor_seconds(problem.sync)

    @cache
    def wave(mask: int, free: tuple[int, ...]) -> tuple[float, _Groups]:
        """Return the fastest wave for the sequences of `mask` on the free ranks of each node."""
        best: tuple[float, _Groups] = (math.inf, ())
        for pack, counts in product(_parts(mask), product(*(range(ranks + 1) for ranks in free))):
            own = seconds[pack][sum(counts)][_ACROSS if sum(map(bool, counts)) > 1 else _INSIDE]
            # The wave lasts at least as long as this pack: no need to solve the rest.
            if own < best[0]:
                left = tuple(ranks - count for ranks, count in zip(free, counts, strict=True))
                others, groups = wave(mask ^ pack, left) if mask ^ pack else (0.0, ())
                best = min(best, (max(own, others), ((pack, counts), *groups)), key=lambda one: one[0])
        return best

    @cache
    def step(mask: int) -> tuple[float, tuple[_Groups, ...]]:
        """Return the fastest waves for the sequences of `mask`; the first wave runs the first sequence."""
        if not mask:
            return 0.0, ()
        waves = ((part, *wave(part, sizes)) for part in _parts(mask))
        found = (
            (max(floor, own) + step(mask ^ part)[0], (groups, *step(mask ^ part)[1])) for part, own, groups in waves
        )
        return min(found, key=lambda one: one[0])

    return _assignment(step(2 ** len(batch.rows) - 1)[1], sizes, are_numbered=problem.sync == "microbatch")


def _parts(mask: int) -> Iterator[int]:
    """Yield the subsets of a mask that contain its lowest bit."""
    low, part = mask & -mask, mask
    while part:
        if part & low:
            yield part
        part = (part - 1) & mask


def _node_sizes(problem: Problem) -> tuple[int, ...]:
    """Return the ranks of each node; nodes of one rank count as a single node whose rings are priced across nodes."""
    per_node = problem.num_ranks if problem.ranks_per_node == 1 else problem.ranks_per_node
    return tuple(min(per_node, problem.num_ranks - first) for first in range(0, problem.num_ranks, per_node))


def _prices(batch: Batch, problem: Problem) -> FloatArray:
    """Return [2^n, ranks + 1, 2] seconds of each mask's sequences by degree, inside a node and across nodes."""
    ranks, per_node, sequences = problem.num_ranks, problem.ranks_per_node, len(batch.rows)
    groups = [(degree, _INSIDE, range(degree)) for degree in range(1, min(per_node, ranks) + 1)]
    if per_node < ranks:
        # At least one rank on the second node.
        firsts = [(degree, max(0, per_node - degree + 1)) for degree in range(2, ranks + 1)]
        groups += [(degree, _ACROSS, range(first, first + degree)) for degree, first in firsts]
    members = [[i for i in range(sequences) if mask >> i & 1] for mask in range(1, 2**sequences)]
    work, offsets = batch.work.take(np.concatenate(members)), offsets_of([len(pack) for pack in members])
    seconds, on_nodes = np.full((2**sequences, ranks + 1, 2), np.inf), replace(problem, ranks_per_node=per_node)
    for degree, place, group in groups:
        tokens = pack_work(work, offsets, degree, problem.profile, problem.padding_multiple).tokens
        # `_assignment` may split a group over nodes in another way, which only changes the price if ranks share heads.
        packs = PlacedPacks(
            work=work,
            offsets=offsets,
            rank_offsets=offsets_of([degree] * len(members)),
            ranks=np.tile(np.array(group, dtype=np.int32), len(members)),
        )
        priced = microbatch_prices(packs, on_nodes, problem.profile, heads=problem.attention).seconds
        seconds[1:, degree, place] = np.where(tokens <= degree * problem.tokens_per_rank, priced, np.inf)
    if per_node == 1:
        # Treated as one node (`_node_sizes`), but all messages cross nodes.
        seconds[:, 2:, _INSIDE] = seconds[:, 2:, _ACROSS]
    return seconds


def _assignment(waves: tuple[_Groups, ...], sizes: tuple[int, ...], *, are_numbered: bool) -> Assignment:
    """Return the assignment; each group of a wave gets the next free ranks of its nodes."""
    ranks, packs, numbers = [], [], []
    for number, groups in enumerate(waves):
        firsts = [0, *accumulate(sizes)]
        for mask, counts in groups:
            ranks.append(
                [rank for first, count in zip(firsts, counts, strict=False) for rank in range(first, first + count)]
            )
            firsts = [first + count for first, count in zip(firsts, counts, strict=False)]
            packs.append([i for i in range(mask.bit_length()) if mask >> i & 1])
            numbers.append(number if are_numbered else -1)
    return Assignment(
        wave=np.array(numbers, dtype=np.int32),
        rank_offsets=offsets_of([len(group) for group in ranks]),
        ranks=np.concatenate(ranks).astype(np.int32),
        member_offsets=offsets_of([len(pack) for pack in packs]),
        members=np.concatenate(packs),
    )
