"""Plans of the strategies for a setting, and what they take under the whole cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from benchmarks.study.baseline import StandardPacking, best_standard_packing
from benchmarks.study.workload import Setting
from benchmarks.workloads import MAX_LENGTH
from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.problem import Batch, Solver
from fcp_cli.planning.solvers import make_solver

STANDARD, ULYSSES, STATIC, PAPER, OURS, SPLIT = (
    "standard packing",
    "standard packing, Ulysses",
    "static",
    "fcp-paper",
    "fcp",
    "fcp, 2d",
)
STRATEGIES = (STANDARD, ULYSSES, STATIC, PAPER, OURS, SPLIT)
_ATTENTION: dict[str, SplitAttention] = {ULYSSES: "ulysses", SPLIT: "2d"}  # others run rings
SYNCS: tuple[Sync, ...] = ("microbatch", "iteration")

_Solver: TypeAlias = Solver | StandardPacking


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One strategy on the steps of a setting under one sync.

    Attributes:
        step_seconds: predicted, the mean.
        gap: sum of step times / sum of proven lower bounds - 1.
        planning_seconds: wall time per step, the median, measured here.
        degree: of a static strategy; None for the others.
    """

    step_seconds: float
    gap: float
    planning_seconds: float
    degree: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A setting and its outcomes.

    Attributes:
        tokens: of the planned steps.
        longest_tokens: of any sequence in them.
        outcomes: of each strategy and sync; none of a strategy that cannot plan the setting.
    """

    setting: Setting
    steps: int
    tokens: int
    longest_tokens: int
    outcomes: dict[tuple[str, Sync], Outcome]

    def speedup(self, sync: Sync, *, of: str = OURS, over: str) -> float:
        return self.outcomes[over, sync].step_seconds / self.outcomes[of, sync].step_seconds

    def speedups(self, *, of: str = OURS, over: str) -> list[float]:
        """Under each of `SYNCS`."""
        return [self.speedup(sync, of=of, over=over) for sync in SYNCS]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def batches_of(
    setting: Setting, table: LengthTable, sync: Sync, *, steps: int, attention: SplitAttention | None = None
) -> GlobalBatches:
    """The first steps of a manifest, in its order; the few clips of more than 128k tokens are left out."""
    settings = BatchSettings(
        global_batch_size=setting.batch_size, shuffle=False, max_length=MAX_LENGTH, overlong="drop", step_limit=steps
    )
    return GlobalBatches(table, replace(setting.problem(sync), attention=attention), settings)


def run_cell(setting: Setting, table: LengthTable, *, steps: int, strategies: Sequence[str] = STRATEGIES) -> Cell:
    """Let the strategies plan the same steps under both syncs."""
    outcomes: dict[tuple[str, Sync], Outcome] = {}
    planned: list[Batch] = []
    for sync, name in product(SYNCS, strategies):
        batches = batches_of(setting, table, sync, steps=steps, attention=_ATTENTION.get(name))
        planned = list(batches)
        solver = _solver(name, batches, planned)
        if solver is not None:
            outcomes[name, sync] = _outcome(solver, batches, planned)
    return Cell(
        setting=setting,
        steps=len(planned),
        tokens=sum(int(batch.work.tokens.sum()) for batch in planned),
        longest_tokens=max(int(batch.work.tokens.max()) for batch in planned),
        outcomes=outcomes,
    )


def _solver(name: str, batches: GlobalBatches, planned: Sequence[Batch]) -> _Solver | None:
    if name in (STANDARD, ULYSSES):
        return best_standard_packing(batches.problem, planned)
    return make_solver(OURS if name == SPLIT else name, batches)


def _outcome(solver: _Solver, batches: GlobalBatches, planned: Sequence[Batch]) -> Outcome:
    bound = sum(lower_bound_seconds(batch.work, batches.problem) for batch in planned)
    seconds, planning = [], []
    for batch in planned:
        started = time.perf_counter()
        assignment = solver.assign(batch)
        planning.append(time.perf_counter() - started)
        # The bound is known already; a step of a plan file would repeat its own.
        seconds.append(assemble(assignment, batch, batches.problem, bound_seconds=0.0).makespan_seconds)
    return Outcome(
        step_seconds=statistics.fmean(seconds),
        gap=sum(seconds) / bound - 1,
        planning_seconds=statistics.median(planning),
        degree=solver.options.get("degree"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderGain:
    """Our plans that know the encoder's work against our plans that see tokens alone, both under the whole cost.

    Attributes:
        encoder_share: of all work.
        gains: step time without knowing it / with.
    """

    setting: Setting
    encoder_share: float
    gains: dict[Sync, float]


def run_encoder_gain(setting: Setting, table: LengthTable, *, steps: int) -> EncoderGain:
    """Plan the same steps twice."""
    blind = replace(table, vision_patches=None, vision_patch_pairs=None)
    gains: dict[Sync, float] = {}
    for sync in SYNCS:
        real = batches_of(setting, table, sync, steps=steps)
        unaware, aware = (_seconds_under(real, batches_of(setting, seen, sync, steps=steps)) for seen in (blind, table))
        gains[sync] = unaware / aware
    whole, tokens = (
        sum(batch.work.total_seconds.sum() for batch in batches_of(setting, seen, "iteration", steps=steps))
        for seen in (table, blind)
    )
    return EncoderGain(setting=setting, encoder_share=float(1 - tokens / whole), gains=gains)


def _seconds_under(real: GlobalBatches, seen: GlobalBatches) -> float:
    """Seconds of all steps, planned from what is seen and priced by what is real."""
    solver = make_solver(OURS, seen)
    return sum(
        assemble(solver.assign(batch), truth, real.problem, bound_seconds=0.0).makespan_seconds
        for batch, truth in zip(seen, real, strict=True)
    )
