"""The pictures of the documentation, drawn from plans that are made on the spot: `make pictures`.

The work is data that every machine has: the source code of Python's own standard library at a token per byte, and the
synthetic families of `benchmarks.workloads`. The charts are those of `fcp report`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import FAMILIES, MAX_LENGTH, example_profile, family_table
from fcp_cli.cli.paced import library_table, typical_step
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.report import charts
from fcp_cli.report.page_data import Columns, HeatMap, bars_of
from fcp_cli.report.plan_tables import RanksShown

# Neighbouring cells of a heat map would show the page between them.
_STYLE = "<style>.mark-rect path { shape-rendering: crispEdges; }</style>"

Curves = Mapping[str, Sequence[tuple[float, float]]]  # label -> (ranks, value)

RANKS, RANKS_PER_NODE, BATCH_SIZE, STEPS = 64, 8, 64, 12
EVERY_RANK = RanksShown(num_ranks=RANKS, ranks_per_node=RANKS_PER_NODE)
STATIC, FCP = "static", "fcp"
_WIDTH = 760
COLOURS = ("#3f8fd2", "#e0702e", "#1fa08a", "#c9487f")  # of curves, in their order
_INK = "#6e7781"  # contrast of more than 4:1 on white and on near-black, since a README may be shown on either


def planned(table: LengthTable, solver_name: str, *, steps: int) -> list[StepPlan]:
    """The first steps of a plan for Qwen3-8B, predicted from assumed coefficients."""
    problem = Problem(
        num_ranks=RANKS,
        ranks_per_node=RANKS_PER_NODE,
        tokens_per_rank=16_384,
        sync="iteration",
        profile=example_profile(),
    )
    settings = BatchSettings(global_batch_size=BATCH_SIZE, max_length=MAX_LENGTH, overlong="drop", step_limit=steps)
    batches = GlobalBatches(table, problem, settings)
    solver = make_solver(solver_name, batches)
    return [assemble(solver.assign(batch), batch, problem) for batch in batches]


def gantt_spec(plans: Mapping[str, Sequence[StepPlan]]) -> charts.Spec:
    """One step of the best static plan over the same step of ours, on one time axis."""
    static, ours = ([step.makespan_seconds for step in plans[name]] for name in (STATIC, FCP))
    at = typical_step(static, ours)
    colours = charts.DegreeColours({int(d) for steps in plans.values() for d in np.unique(steps[at].degrees)})
    parts = []
    for name, steps in plans.items():
        step = steps[at]
        ends: Columns = {
            "at": np.array([step.bound_seconds, step.makespan_seconds]),
            "what": ["bound", "planned end"],
        }
        chart = charts.gantt_chart(bars_of(step, EVERY_RANK), ends, colours, shown=EVERY_RANK)
        title = f"{_named(name, step)}: {step.makespan_seconds:.1f} s, ranks idle {step.idle_fraction(RANKS):.1%}"
        parts.append(sized(chart, 210, title))
    return {"vconcat": parts, "resolve": {"scale": {"x": "shared"}}, "spacing": 24}


def _named(name: str, step: StepPlan) -> str:
    return f"{name}, degree {step.degrees.max()}" if name == STATIC else name


def idle_spec(plans: Mapping[str, Sequence[StepPlan]]) -> charts.Spec:
    """Idle share of every rank in every step of both plans, on one scale."""
    heats = {name: HeatMap(steps=len(steps), num_ranks=RANKS) for name, steps in plans.items()}
    for name, steps in plans.items():
        for step in steps:
            heats[name].add(step.step, 1.0 - step.busy_seconds(RANKS) / step.makespan_seconds)
    most = charts.largest_idle(*(heat.cells() for heat in heats.values()))
    parts = []
    for name, steps in plans.items():
        seconds = sum(step.makespan_seconds for step in steps)
        busy = sum(float(step.busy_seconds(RANKS).sum()) for step in steps)
        title = f"{_named(name, steps[0])}: {seconds:.0f} s, idle {1 - busy / (RANKS * seconds):.1%}"
        chart = charts.heat_chart(heats[name].cells(), ranks=EVERY_RANK, most=most)
        parts.append({**sized(chart, 200, title), "width": 340})
    return {"hconcat": parts, "spacing": 30}


def degrees_spec(plans: Mapping[str, Sequence[StepPlan]]) -> charts.Spec:
    """Share of each degree in the rank-seconds of our plans of different data."""
    summaries = {}
    for name, steps in plans.items():
        summary = summaries[name] = PlanSummary(num_ranks=RANKS)
        for step in steps:
            summary.add(step)
    rows = [
        (degree, name, totals.rank_seconds / summary.busy_rank_seconds)
        for name, summary in summaries.items()
        for degree, totals in sorted(summary.degrees.items())
    ]
    degrees, names, shares = zip(*rows, strict=True)
    mix: Columns = {"degree": np.array(degrees), "measure": list(names), "share": np.array(shares)}
    return sized(charts.mix_chart(mix, charts.DegreeColours(degrees)), 34 * len(plans), "share of rank-seconds")


def growth_spec(panels: Mapping[str, tuple[Curves, bool]]) -> charts.Spec:
    """Values over ranks; panels are title -> (curves, whether the value axis is logarithmic)."""
    return {"hconcat": [curves_spec(title, *panel) for title, panel in panels.items()], "spacing": 40}


def curves_spec(title: str, curves: Curves, logarithmic: bool, *, over: str = "ranks") -> charts.Spec:
    """Curves over numbers that grow by a factor; `over` says what these are."""
    rows = [(label, ranks, value) for label, points in curves.items() for ranks, value in points]
    labels, ranks, values = zip(*rows, strict=True)
    data = charts.inline_csv({"sync": list(labels), "ranks": np.array(ranks), "value": np.array(values)})
    x = {"type": "quantitative", "title": over, "scale": {"type": "log", "base": 2, "nice": False}}
    y = {"type": "quantitative", "title": None, "scale": {"type": "log"} if logarithmic else {"zero": True}}
    colours = {"domain": list(curves), "range": list(COLOURS[: len(curves)])}
    chart = {
        "data": data,
        "mark": {"type": "line", "point": {"size": 25}, "strokeWidth": 1.8},
        "encoding": {
            "x": {"field": "ranks", **x, "axis": {"format": "d", "values": sorted(set(ranks))[::2]}},
            "y": {"field": "value", **y, "axis": {"format": ",~r", "labelOverlap": True}},
            "color": {"field": "sync", "type": "nominal", "title": None, "scale": colours},
        },
    }
    return {**sized(chart, 220, title), "width": 330}


def write_growth(path: Path, panels: Mapping[str, tuple[Curves, bool]]) -> None:
    """Write growth curves as one picture; panels as in `growth_spec`."""
    path.write_text(svg(growth_spec(panels)), encoding="utf-8")


def sized(chart: charts.Spec, height: int, title: str) -> charts.Spec:
    """A chart of the page, with a width and a title of its own."""
    anchor = {"text": title, "anchor": "start", "fontWeight": "normal", "fontSize": 13}
    anchor |= {"color": "currentColor", "frame": "group"}
    return {**chart, "width": _WIDTH, "height": height, "title": anchor}


def svg(spec: charts.Spec) -> str:
    """The picture of a Vega-Lite specification, with lines and words in one ink for light and dark pages."""
    import vl_convert

    drawn: str = vl_convert.vegalite_to_svg({**spec, "padding": 12}, config=charts.CONFIG)
    drawn = re.sub(r'fill-opacity="(0\.\d{3})\d+"', r'fill-opacity="\1"', drawn)  # finer than eyes see
    head, end, rest = drawn.replace("<svg ", f'<svg color="{_INK}" ', 1).partition(">")
    return f"{head}{end}{_STYLE}{rest}\n"


def specs(steps: int) -> dict[str, Any]:
    """The pictures by file name: of `steps` steps of every data set."""
    library = library_table()
    plans = {name: planned(library, name, steps=steps) for name in (STATIC, FCP)}
    families = {
        family: planned(family_table(family, sequences=BATCH_SIZE * steps, seed=0), FCP, steps=steps)
        for family in FAMILIES
    }
    return {
        "step.svg": gantt_spec(plans),
        "idle.svg": idle_spec(plans),
        "degrees.svg": degrees_spec({"standard library": plans[FCP], **families}),
    }


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/pictures"))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, spec in specs(options.steps).items():
        picture = svg(spec)
        (options.folder / name).write_text(picture, encoding="utf-8")
        print(f"{options.folder / name}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
