"""Step times in wall time on ranks that lend each other no cores: static, fcp-paper and fcp on the same work.

    python -m benchmarks.pace [--ranks 8 16] [--steps N] [--picture FILE]

Each rank is a process of the real runtime, on a device that computes nothing and takes the seconds of Qwen3-8B on H200s
in nodes of four, as `fcp profile --analytic` gives them, times `SLOWER`. Its keys, values and gradients really travel,
over gloo, and arrive no sooner than over that cluster's links (`device`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.pace.ranks import follow, metrics_of, run_job
from benchmarks.picture import library_table, sized, svg
from fcp_cli.cost.profile import Bandwidth, CostProfile, StepTerms, dump_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.reader import PlanReader
from fcp_cli.plan.writer import plan_writer
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.run import plan_metadata, plan_step
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.analytic import analytic_profile
from fcp_cli.recipe import Recipe
from fcp_cli.report import chart_parts, charts
from fcp_cli.report.page_data import Columns
from fcp_cli.report.ranks_shown import RanksShown
from fcp_cli.report.run_picture import measured_bars
from fcp_cli.runs.metrics_reader import RunStep, read_metrics, run_step

STRATEGIES = ("static", "fcp-paper", "fcp")
RANKS_PER_NODE = 4
# Sixteen processes that share two cores take milliseconds for a hop; a step shall take many times that.
SLOWER = 4.0
_START_SECONDS, _MOST_PER_PREDICTED = 120.0, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained: the first steps of a table, longer sequences left out."""

    table: LengthTable
    steps: int
    tokens_per_rank: int = 8192
    max_length: int = 65_536
    sequences_per_rank: int = 2  # and step
    slower: float = SLOWER


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one plan was predicted to take, and took.

    Attributes:
        plan: file of the plan.
        steps: as they were measured, in order; the first, which warms up, is left out.
    """

    plan: Path
    steps: tuple[RunStep, ...]

    @property
    def predicted_seconds(self) -> float:
        """Return the mean of a step."""
        return float(np.mean([step.predicted_seconds for step in self.steps]))

    @property
    def measured_seconds(self) -> float:
        """Return the mean of a step, from its start to its last optimizer step."""
        return float(np.mean([step.seconds for step in self.steps]))


def paced_profile(num_ranks: int, slower: float) -> CostProfile:
    """Return the computed profile of Qwen3-8B on H200s, all seconds times `slower`, less what follows micro-batches."""
    computed = analytic_profile(
        load_model("qwen3-8b"), load_cluster("h200-8x8"), recipe=Recipe(), sync="iteration", ranks=num_ranks
    )
    c, bandwidth = computed.coefficients, computed.bandwidth
    coefficients = replace(
        c, **{name: slower * getattr(c, name) for name in asdict(c) if name.partition("_per_")[0].endswith("seconds")}
    )
    profile = replace(
        computed,
        cluster=f"paced ranks, seconds of h200-8x8 times {slower:g}",
        coefficients=coefficients,
        bandwidth=Bandwidth(intra_node=bandwidth.intra_node / slower, inter_node=bandwidth.inter_node / slower),
        step=StepTerms(),
    )
    return replace(profile, text=dump_cost_profile(profile))


def write_plan(path: Path, strategy: str, work: Work, problem: Problem) -> None:
    """Plan the work by one strategy."""
    settings = BatchSettings(
        global_batch_size=work.sequences_per_rank * problem.num_ranks,
        max_length=work.max_length,
        overlong="drop",
        step_limit=work.steps,
    )
    batches = GlobalBatches(work.table, problem, settings)
    solver = make_solver(strategy, batches)
    with plan_writer(path, plan_metadata(work.table, batches, solver)) as writer:
        for batch in batches:
            writer.append(plan_step(batch, problem, solver))


def run(folder: Path, work: Work, *, num_ranks: int, strategies: Sequence[str] = STRATEGIES) -> dict[str, Outcome]:
    """Plan by each strategy, and follow the plans one after the other; strategy -> outcome."""
    problem = Problem(
        num_ranks=num_ranks,
        ranks_per_node=RANKS_PER_NODE,
        tokens_per_rank=work.tokens_per_rank,
        sync="iteration",
        profile=paced_profile(num_ranks, work.slower),
    )
    plans = {strategy: folder / f"{strategy}-{num_ranks}.parquet" for strategy in strategies}
    for strategy, path in plans.items():
        write_plan(path, strategy, work, problem)
    predicted = sum(step.makespan_seconds for path in plans.values() for step in PlanReader(path).steps())
    most = _START_SECONDS + _MOST_PER_PREDICTED * predicted
    run_job(follow, num_ranks, tuple(plans.values()), most_seconds=most)
    return {strategy: Outcome(plan=path, steps=measured_steps(path)) for strategy, path in plans.items()}


def measured_steps(plan: Path) -> tuple[RunStep, ...]:
    """Return the steps of a plan's run, without the first, which also meets for the first time."""
    steps = (run_step(record) for record in read_metrics(metrics_of(plan)) if record["kind"] == "step")
    return tuple(step for step in steps if not step.warm_up)


def lines(num_ranks: int, outcomes: dict[str, Outcome]) -> list[str]:
    """Return the rows of the table."""
    static = outcomes["static"]
    return [
        f"| {num_ranks} | {strategy} | {one.predicted_seconds:.2f} | {one.measured_seconds:.2f} "
        f"| {one.predicted_seconds / one.measured_seconds - 1:+.1%} "
        f"| {static.predicted_seconds / one.predicted_seconds:.2f}x "
        f"| {static.measured_seconds / one.measured_seconds:.2f}x |"
        for strategy, one in outcomes.items()
    ]


def picture(outcomes: dict[str, Outcome]) -> str:
    """Draw the step whose gain is nearest to that of all: what ran where, as it was measured."""
    static, ours = outcomes["static"], outcomes["fcp"]
    whole = static.measured_seconds / ours.measured_seconds
    at = min(range(len(ours.steps)), key=lambda i: abs(static.steps[i].seconds / ours.steps[i].seconds - whole))
    colours = chart_parts.DegreeColours({int(d) for one in outcomes.values() for d in one.steps[at].degrees})
    shown = RanksShown.all_of(PlanReader(ours.plan).metadata)
    parts = []
    for strategy, one in outcomes.items():
        step = one.steps[at]
        ends: Columns = {
            "at": np.array([step.predicted_seconds, step.seconds]),
            "what": ["planned end", "measured end"],
        }
        chart = charts.gantt_chart(measured_bars(step, shown), ends, colours, shown=shown)
        title = f"{strategy}: {step.seconds:.1f} s measured, {step.predicted_seconds:.1f} s predicted"
        parts.append(sized(chart, 150, title))
    return svg({"vconcat": parts, "resolve": {"scale": {"x": "shared"}}, "spacing": 24})


def main() -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--steps", type=int, default=5, help="of each plan, the first of which is left out")
    parser.add_argument("--picture", type=Path, help="where to draw a step of the last number of ranks")
    options = parser.parse_args()
    print("| ranks | strategy | predicted step, s | measured step, s | error | speed-up, predicted | measured |")
    print("|---:|---|---:|---:|---:|---:|---:|", flush=True)
    work = Work(table=library_table(), steps=options.steps)  # real lengths: a token per byte
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            outcomes = run(Path(folder), work, num_ranks=num_ranks)
            print(*lines(num_ranks, outcomes), sep="\n", flush=True)
        if options.picture is not None:
            options.picture.write_text(picture(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
