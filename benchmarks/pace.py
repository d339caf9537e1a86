"""Step times in wall time on ranks that lend each other no cores: static, fcp-paper and fcp on the same work.

    python -m benchmarks.pace [--ranks 8 16] [--steps N] [--picture FILE]

The ranks are those of `fcp_cli/cli/paced.py`, with every second four times as long: sixteen processes that share two
cores take milliseconds for a hop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.picture import sized, svg
from fcp_cli.cli.paced import PacedSteps, PacedWork, library_table, run, typical_step, write_plans
from fcp_cli.plan.file import PlanReader
from fcp_cli.report import charts
from fcp_cli.report.page_data import Columns, measured_bars
from fcp_cli.report.plan_tables import RanksShown

STRATEGIES = ("static", "fcp-paper", "fcp")


def lines(num_ranks: int, outcomes: dict[str, PacedSteps]) -> list[str]:
    """Return the rows of the table."""
    static = outcomes["static"]
    return [
        f"| {num_ranks} | {strategy} | {one.predicted_seconds:.2f} | {one.measured_seconds:.2f} "
        f"| {one.predicted_seconds / one.measured_seconds - 1:+.1%} "
        f"| {static.predicted_seconds / one.predicted_seconds:.2f}x "
        f"| {static.measured_seconds / one.measured_seconds:.2f}x |"
        for strategy, one in outcomes.items()
    ]


def picture(outcomes: dict[str, PacedSteps]) -> str:
    """Draw the step whose gain is nearest to that of all: what ran where, as it was measured."""
    static, ours = outcomes["static"], outcomes["fcp"]
    at = typical_step([step.seconds for step in static.steps], [step.seconds for step in ours.steps])
    colours = charts.DegreeColours({int(d) for one in outcomes.values() for d in one.steps[at].degrees})
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
    work = PacedWork(table=library_table(), steps=options.steps)  # real lengths: a token per byte
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            plans = write_plans(Path(folder), work, num_ranks=num_ranks, strategies=STRATEGIES)
            outcomes = run(plans, num_ranks=num_ranks)
            print(*lines(num_ranks, outcomes), sep="\n", flush=True)
        if options.picture is not None:
            options.picture.write_text(picture(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
