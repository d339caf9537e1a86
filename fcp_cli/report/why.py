"""Explains a group's degree: the cost of one rank fewer or more, and the deciding constraint.

Prices the same pack at neighbouring degrees with the cost model; the search is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fcp_cli.cost.model import group_seconds, pack_parts
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.pricing import planned_sequences, ranks_together
from fcp_cli.plan.setup import Pipeline
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.problem import Problem, work_on
from fcp_cli.report.plan_tables import stage_times, step_seconds_with
from fcp_cli.util.console import new_table, print_table
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Bound = Literal["memory", "balance", "topology", "ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The pack at a given degree.

    Attributes:
        tokens_per_rank: maximum tokens per rank.
        fits: whether `tokens_per_rank` is within the budget.
        crosses_nodes: whether the planned group spans nodes; at other degrees, whether no node is large enough.
        heads_degree: Ulysses degree: as planned, or the fastest at other degrees.
        split_seconds: seconds by possible Ulysses degree.
        seconds, attention_seconds, ring_seconds: predicted; the first includes the longer of the others. Ring seconds
            exclude the share that attention cannot hide (`exposed_ring_share`).
        end_seconds: end time if started as planned; with pipeline stages, end of the step if it took this long on its
            planned ranks.
    """

    degree: int
    tokens_per_rank: int
    fits: bool
    crosses_nodes: bool
    seconds: float
    attention_seconds: float
    ring_seconds: float
    end_seconds: float
    heads_degree: int
    split_seconds: Mapping[int, float]

    @property
    def rank_seconds(self) -> float:
        return self.degree * self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Times of a micro-batch in its pipeline stages, from the start of the step.

    Attributes:
        forward_seconds, backward_seconds: start in each block of layers; block b is on stage b % P.
        end_seconds: end of its last backward pass.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    end_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Reason against a neighbouring degree."""

    degree: int
    bound: Bound
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A micro-batch, its neighbouring degrees, the reasons against them, and its pipeline times.

    `candidate` is the planner candidate that won the step, or None if unknown.
    """

    microbatch: MicroBatch
    alternatives: tuple[Alternative, ...]
    reasons: tuple[Reason, ...]
    stages: Stages | None = None
    candidate: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.microbatch.step,
            "order": self.microbatch.order,
            "degree": self.microbatch.degree,
            "alternatives": [{**asdict(a), "rank_seconds": a.rank_seconds} for a in self.alternatives],
            "reasons": [asdict(reason) for reason in self.reasons],
            **({} if self.stages is None else {"stages": asdict(self.stages)}),
            **({} if self.candidate is None else {"candidate": self.candidate}),
        }


def explain_degree(
    step: StepPlan,
    order: int,
    problem: Problem,
    *,
    manifest: LengthTable | None = None,
    metadata: PlanMetadata | None = None,
) -> Explanation:
    """Price a micro-batch at its degree, and with one rank fewer and more.

    Args:
        step: the planned step.
        order: index of a non-idle micro-batch.
        problem: planning problem of the plan.
        manifest: provides `eta` and vision columns; without it, sequences count as causal text.
        metadata: plan metadata, for pipeline times.
    """
    microbatch = step.microbatch(order)
    degrees = [
        d for d in (microbatch.degree - 1, microbatch.degree, microbatch.degree + 1) if 1 <= d <= problem.num_ranks
    ]
    priced = {degree: _priced(step, microbatch, degree, problem, manifest) for degree in degrees}
    stages: Stages | None = None
    if metadata is not None and metadata.pipeline is not None:
        stages = _stages(step, order, metadata, metadata.pipeline)
        priced = {
            degree: replace(
                found, end_seconds=step_seconds_with(step, order, found.seconds, metadata, metadata.pipeline)
            )
            for degree, found in priced.items()
        }
    fewer, more = _against_fewer(microbatch, priced, step, problem), _against_more(microbatch, priced, step, problem)
    return Explanation(
        microbatch=microbatch,
        alternatives=tuple(priced.values()),
        reasons=(fewer, more) if fewer is not None else (more,),
        stages=stages,
    )


def _stages(step: StepPlan, order: int, metadata: PlanMetadata, pipeline: Pipeline) -> Stages:
    times = stage_times(step, metadata, pipeline)
    return Stages(
        forward_seconds=tuple(times.forward_start[order].tolist()),
        backward_seconds=tuple(times.backward_start[order].tolist()),
        end_seconds=float((times.backward_start + times.backward_seconds)[order].max()),
    )


def _priced(
    step: StepPlan, microbatch: MicroBatch, degree: int, problem: Problem, manifest: LengthTable | None
) -> Alternative:
    members = slice(int(step.sequence_offsets[microbatch.order]), int(step.sequence_offsets[microbatch.order + 1]))
    sequences = planned_sequences(step, manifest)
    work = work_on(batch_of(sequences, problem).work, degree, problem)
    pack = work.take(members).packed(np.zeros(1, dtype=np.int64)).take(0)
    attention, tokens = pack.attention_seconds, int(pack.tokens)
    size = problem.ranks_per_node
    crosses = (
        microbatch.ranks[0] // size != microbatch.ranks[-1] // size if degree == microbatch.degree else degree > size
    )
    slowest = min((problem.rank_speeds[rank] for rank in microbatch.ranks), default=1.0) if problem.rank_speeds else 1.0
    splits = {
        heads_degree: float(
            group_seconds(
                problem.profile,
                pack,
                degree=degree,
                crosses_nodes=crosses,
                heads_degree=heads_degree,
                sets_cross_nodes=heads_degree > size,
            )
        )
        / slowest
        for heads_degree in _heads_degrees(microbatch, degree, problem)
    }
    heads_degree = microbatch.heads_degree if degree == microbatch.degree else min(splits, key=splits.__getitem__)
    seconds = splits[heads_degree]
    parts = pack_parts(problem.profile, pack, degree=degree, crosses_nodes=crosses, heads_degree=heads_degree)
    held = -(-tokens // degree)
    return Alternative(
        degree=degree,
        tokens_per_rank=held,
        fits=tokens <= problem.tokens_per_rank * degree,
        crosses_nodes=crosses,
        seconds=seconds,
        attention_seconds=float(attention) / degree / slowest,
        ring_seconds=float(parts.hidden) / slowest,
        end_seconds=microbatch.start_seconds + seconds,
        heads_degree=heads_degree,
        split_seconds=splits,
    )


def _heads_degrees(microbatch: MicroBatch, degree: int, problem: Problem) -> list[int]:
    """Return the possible Ulysses degrees of a group, including the planned one."""
    heads, size = problem.profile.heads, problem.ranks_per_node
    if degree == 1 or problem.attention is None or heads is None:
        return [1]
    if problem.attention == "ulysses":
        return [degree]
    if degree == microbatch.degree:
        ranks = np.array(microbatch.ranks, dtype=np.int32)
        together = int(ranks_together(np.array([0, degree]), ranks, size)[0])
    else:
        together = math.gcd(degree, size) if degree > size else degree
    return sorted({1, *(u for u in heads.degrees(size) if together % u == 0)})


def _against_fewer(
    microbatch: MicroBatch, priced: dict[int, Alternative], step: StepPlan, problem: Problem
) -> Reason | None:
    if microbatch.degree == 1:
        return None
    fewer, own = priced[microbatch.degree - 1], priced[microbatch.degree]
    if not fewer.fits:
        text = f"each would hold {fewer.tokens_per_rank:,} tokens, over the budget of {problem.tokens_per_rank:,}"
        return Reason(degree=fewer.degree, bound="memory", text=text)
    limit, event = _time_limit(microbatch, step, problem)
    if fewer.end_seconds > limit * (1 + 1e-9):
        text = f"it would end at {fewer.end_seconds:.3f} s, after {event} at {limit:.3f} s"
        if problem.pipeline is not None:
            text = f"the step would end at {fewer.end_seconds:.3f} s, and not at {limit:.3f} s"
        return Reason(degree=fewer.degree, bound="balance", text=text)
    saved = 1.0 - fewer.rank_seconds / own.rank_seconds
    if own.rank_seconds < fewer.rank_seconds:
        text = f"it would cost {-saved:.1%} more rank-seconds"
    else:
        text = f"it would fit and save {saved:.1%} of its rank-seconds; balance is better at {microbatch.degree}"
    return Reason(degree=fewer.degree, bound="balance", text=text)


def _against_more(microbatch: MicroBatch, priced: dict[int, Alternative], step: StepPlan, problem: Problem) -> Reason:
    more, own = priced.get(microbatch.degree + 1), priced[microbatch.degree]
    if more is None:
        return Reason(
            degree=microbatch.degree + 1, bound="ranks", text=f"there are only {counted(problem.num_ranks, 'rank')}"
        )
    gain = own.seconds - more.seconds
    extra = more.rank_seconds / own.rank_seconds - 1.0
    sooner, fewer = "sooner" if gain >= 0 else "later", "fewer" if extra < 0 else "more"
    change = f"{abs(gain):.3f} s {sooner} for {abs(extra):.1%} {fewer} rank-seconds"
    if more.crosses_nodes and not own.crosses_nodes:
        text = f"its ring would leave the node: {more.seconds:.3f} s instead of {own.seconds:.3f} s"
        return Reason(degree=more.degree, bound="topology", text=text)
    # No reason against one rank more if the chosen ring outlasts attention, too.
    if more.ring_seconds > more.attention_seconds and own.ring_seconds <= own.attention_seconds:
        text = (
            f"its ring ({more.ring_seconds:.3f} s) would outlast attention ({more.attention_seconds:.3f} s): {change}"
        )
        return Reason(degree=more.degree, bound="topology", text=text)
    limit, event = _time_limit(microbatch, step, problem)
    slack = limit - own.end_seconds
    text = f"{change}; "
    if problem.pipeline is not None:
        saved = max(own.end_seconds - more.end_seconds, 0.0)
        text += f"the step would end {saved:.3f} s sooner, if the extra rank were idle"
    elif slack > 1e-3 * limit:
        text += f"it already ends {slack:.3f} s before {event}"
    else:
        idle = step.idle_fraction(problem.num_ranks)
        text += f"it ends with {event}, and an extra rank would be missing elsewhere; ranks idle {idle:.1%} of the step"
    return Reason(degree=more.degree, bound="balance", text=text)


def _time_limit(microbatch: MicroBatch, step: StepPlan, problem: Problem) -> tuple[float, str]:
    """Return the end time and name of the step or wave for which its ranks wait."""
    if microbatch.wave < 0 or problem.pipeline is not None:
        return step.makespan_seconds, "the step"
    in_wave = step.wave == microbatch.wave
    return float(np.max((step.start_seconds + step.seconds)[in_wave])), f"wave {microbatch.wave}"


def print_why(console: Console, explanation: Explanation) -> None:
    """Print an explanation in 80 columns."""
    for line in (*_introduction(explanation), *_splits(explanation), *_way(explanation.stages)):
        console.print(line, markup=False)
    print_table(console, _table(explanation))
    for reason in explanation.reasons:
        console.print(f"not {reason.degree}: [bold]{reason.bound}[/]: {reason.text}")


def _introduction(explanation: Explanation) -> Iterator[str]:
    microbatch = explanation.microbatch
    count = len(microbatch.sequences)
    yield (
        f"step {microbatch.step}, micro-batch {microbatch.order}: degree {microbatch.described_degree}, "
        f"{'one sequence' if count == 1 else counted(count, 'sequence')}, "
        f"{counted(microbatch.tokens, 'token')}, longest {max(microbatch.lengths):,}"
    )
    if explanation.candidate is not None:
        yield f"the step was won by the candidate: {explanation.candidate}"


def _splits(explanation: Explanation) -> Iterator[str]:
    """Describe the times at other Ulysses degrees."""
    planned = next(a for a in explanation.alternatives if a.degree == explanation.microbatch.degree)
    if len(planned.split_seconds) > 1:
        ways = (f"{u} x {planned.degree // u} {s:.3f} s" for u, s in planned.split_seconds.items())
        yield f"Ulysses degree x ring degree: {', '.join(ways)}"


def _way(stages: Stages | None) -> Iterator[str]:
    """Describe when each block of layers runs the micro-batch."""
    if stages is None:
        return
    for direction, begun in (("forward", stages.forward_seconds), ("backward", stages.backward_seconds)):
        yield f"{direction} of blocks 0 to {len(begun) - 1} from {', '.join(f'{at:.3f}' for at in begun)} s on"
    yield f"ends at {stages.end_seconds:.3f} s"


def _table(explanation: Explanation) -> Table:
    table = new_table("degree", "seconds", "rank-s", "attention s", "ring s", "tokens/rank", "spans", left=())
    for a in explanation.alternatives:
        chosen = a.degree == explanation.microbatch.degree
        table.add_row(
            f"{'> ' if chosen else ''}{a.degree}"
            + (f" = {a.heads_degree} x {a.degree // a.heads_degree}" if a.heads_degree > 1 else ""),
            f"{a.seconds:.3f}",
            f"{a.rank_seconds:.3f}",
            f"{a.attention_seconds:.3f}",
            f"{a.ring_seconds:.3f}",
            f"{a.tokens_per_rank:,}{'' if a.fits else ' !'}",
            "nodes" if a.crosses_nodes else "one node" if a.degree > 1 else "",
            style="bold" if chosen else None,
        )
    return table
