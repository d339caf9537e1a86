"""The report as a self-contained HTML page.

Vega-Lite charts are rendered as SVG in the browser. `vl-convert-python` provides the JavaScript libraries as a 0.9 MB
bundle (plotly.js would be 4.8 MB), so the page works offline and can be mailed.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Any

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.errors import FcpError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.report.charts import CONFIG, Speedup, charts_of, degree_shares, device_bytes, has_measured_steps, idle_maps
from fcp_cli.report.page_data import HeatMap, PlanPicture, RunPicture
from fcp_cli.report.profiles import memory_sentence, planned_memory
from fcp_cli.runs.metrics import RunRecord
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.words import counted

_TEMPLATE = Path(__file__).with_name("page.html")
_ORIGINS = {
    "measured": "measured",
    "fitted": "fitted to measurements",
    "analytic": "computed from data sheets, not measured",
    "assumed": "assumed",
}


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """Content of the page.

    Attributes:
        plan: figures of the plan.
        run: figures of the run, if any.
        run_name: name of the run directory.
        run_facts: `run` record of its metrics.
        speedup: gain over the best static plan.
        warnings: one line per input that could not be used completely.
    """

    metadata: PlanMetadata
    plan: PlanPicture
    speedup: Speedup
    run: RunPicture | None = None
    run_name: str = ""
    run_facts: RunRecord | None = None
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def profile(self) -> CostProfile:
        """Cost profile of the plan."""
        return parse_cost_profile(self.metadata.cost_profile, name="the plan's cost profile")

    def html(self) -> str:
        """Render the page."""
        meta, specs = self.metadata, dict(charts_of(self.plan, self.run, self.speedup.ours, self.speedup.static))
        made_by = f"fcp {meta.fcp_version}; plan hash {meta.plan_hash}"
        document = json.dumps({"config": CONFIG, "charts": specs}, allow_nan=False, separators=(",", ":"))
        return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
            title=html.escape(self._title()),
            eyebrow=html.escape(f"Run {self.run_name}" if self.run else "Plan"),
            subtitle=html.escape(self._subtitle()),
            source=facts(self._sources()),
            warnings="".join(f'<p class="warning">{html.escape(warning)}</p>' for warning in self.warnings),
            headline=self._headline(),
            sections="".join(sections_of(self.metadata, self.plan, self.run, self.speedup, frozenset(specs))),
            footer=html.escape(f"{made_by}; manifest {meta.manifest.name}; made {meta.created}"),
            library=javascript_bundle(),
            # A name in the plan that contains "</script" would end the surrounding script.
            charts=document.replace("</", "<\\/"),
        )

    def figures(self) -> dict[str, Any]:
        """Return the headline figures as JSON values; totals cover the steps read."""
        summary = self.plan.summary
        measured = self.run.totals() if self.run is not None and has_measured_steps(self.run) else None
        return {
            "plan_hash": self.metadata.plan_hash,
            "steps_of_plan": self.metadata.steps,
            **summary.to_json(),
            "tokens_per_second": summary.tokens / summary.makespan_seconds,
            "speedup_over_static": self.speedup.factor,
            "distinct_groups": self.metadata.distinct_groups,
            "measured": measured,
            "warnings": self.warnings,
        }

    def _title(self) -> str:
        ranks = counted(self.metadata.num_ranks, "rank")
        if self.run is None:
            return f"{self.profile.model} on {ranks} of {self.profile.cluster}"
        # The plan's profile may name assumed ones, not those of a script that follows the plan.
        model = self.run_facts.get("model") if self.run_facts is not None else None
        return f"{Path(model).name if model else self.run_name} on {ranks}"

    def _subtitle(self) -> str:
        meta = self.metadata
        recipe = f", {meta.recipe.describe()}" if meta.recipe is not None else ""
        return (
            f"{counted(meta.steps, 'step')} of {counted(meta.global_batch_size, 'sequence')} on {meta.ranks_per_node} "
            f"ranks per node, at most {counted(meta.tokens_per_rank, 'token')} each. Planned by {meta.solver}, sync "
            f"{meta.sync}, seed {meta.seed}{recipe}."
        )

    def _sources(self) -> Iterator[tuple[str, str]]:
        profile = self.profile
        yield "Planned times", f"cost profile of {profile.model} on {profile.cluster}: {_ORIGINS[profile.origin]}"
        if self.run is not None and (known := self.run_facts) is not None:
            device = " ".join(filter(None, (known.get("device"), known.get("device_name"))))
            on = f"on {device}" if device else "by the job"
            when = known.get("started", "")[:16].replace("T", " ")
            yield "Measured times", f"{on}, started {when} UTC" if when else on

    def _headline(self) -> str:
        """Render the key figures: planned, and measured if there are any."""
        summary, meta = self.plan.summary, self.metadata
        memory = planned_memory(meta, summary.peers.most if summary.peers is not None else 0)
        takes_bytes = memory.total_bytes(int(self.plan.peak_tokens.max())) if memory is not None else None
        if self.run is None or not has_measured_steps(self.run):
            rate = summary.tokens / summary.makespan_seconds
            rows = [
                ("Mean step", seconds(summary.mean_step_seconds)),
                ("Slowest step", seconds(summary.slowest_step_seconds)),
                ("Tokens per second", f"{rate:,.0f}"),
                ("Idle", f"{summary.idle_fraction:.2%}"),
                *([("Fullest rank", _gigabytes(takes_bytes))] if takes_bytes else []),
            ]
            figures = table(("", "planned"), rows, name="figures")
        else:
            figures = table(
                ("", "planned", "measured", "measured / planned"), self._compared(takes_bytes), name="figures"
            )
        others = [
            ("Above the bound under this cost profile", f"{summary.gap:.2%}"),
            ("Groups of degree over 1", f"{meta.distinct_groups:,} distinct"),
        ]
        if summary.peers is not None:
            others.append(("Ranks that a rank exchanges with", f"{summary.peers.mean:.1f}, most {summary.peers.most}"))
        if self.run is not None and self.run.warm_up_steps:
            others.append(("Excluded from both columns", counted(self.run.warm_up_steps, "warm-up step")))
        return f'<div class="numbers">{figures}{facts(others)}</div>'

    def _compared(self, takes_bytes: float | None) -> Iterator[tuple[str, str, str, str]]:
        assert self.run is not None
        totals = self.run.totals()
        for key, name in (("step_seconds", "Mean step"), ("slowest_seconds", "Slowest step")):
            planned, measured = totals[f"predicted_{key}"], totals[key]
            yield name, seconds(planned), seconds(measured), f"{measured / planned:.3f}"
        planned, measured = totals["predicted_tokens_per_second"], totals["tokens_per_second"]
        yield "Tokens per second", f"{planned:,.0f}", f"{measured:,.0f}", f"{measured / planned:.3f}"
        idle, planned_idle = totals["idle"], totals["predicted_idle"]
        yield "Idle", f"{planned_idle:.2%}", f"{idle:.2%}", f"{100 * (idle - planned_idle):+.1f} points"
        peak_bytes = float(self.run.peak_bytes.max())
        if takes_bytes or peak_bytes:
            ratio = f"{peak_bytes / takes_bytes:.3f}" if takes_bytes and peak_bytes else ""
            yield "Fullest rank", _gigabytes(takes_bytes), _gigabytes(peak_bytes) or "not measured", ratio


def _gigabytes(count_bytes: float | None) -> str:
    """Format bytes in GB, with more digits for small sizes; "" if unknown."""
    if not count_bytes:
        return ""
    return f"{count_bytes / 1e9:.1f} GB" if count_bytes >= 1e9 else f"{count_bytes / 1e9:.2g} GB"


@cache
def javascript_bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    try:
        import vl_convert
    except ImportError as error:
        raise FcpError(f"fcp report needs vl-convert-python: {pip_install('report')}") from error
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def figure(chart: str) -> str:
    """Return the container of a chart."""
    return f'<figure><div class="chart" id="{chart}"></div></figure>'


def part(title: str, caption: str, *charts: str, more: str = "") -> str:
    """Return charts under a level-3 heading."""
    return f"<div><h3>{html.escape(title)}</h3>{text(caption)}{''.join(map(figure, charts))}{more}</div>"


def section(title: str, caption: str, *content: str, name: str = "") -> str:
    """Return a section of the page."""
    mark = f' class="{name}"' if name else ""
    return f"<section{mark}><h2>{html.escape(title)}</h2>{text(caption)}{''.join(content)}</section>"


def side_by_side(*parts: str) -> str:
    """Lay parts out side by side on wide screens."""
    return f'<div class="pair">{"".join(parts)}</div>'


def seconds(value: float) -> str:
    """Format seconds with up to three decimals."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}\u00a0s"


def text(words: str) -> str:
    """Return a paragraph, or "" for empty text."""
    return f"<p>{html.escape(words)}</p>" if words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "") -> str:
    """Return a table; the first cell of a row is its header."""
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = (
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="scroll {name}"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a description list."""
    return (
        "<dl>" + "".join(f"<div><dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd></div>" for a, b in pairs) + "</dl>"
    )


def sections_of(
    metadata: PlanMetadata, plan: PlanPicture, run: RunPicture | None, speedup: Speedup, drawn: frozenset[str]
) -> Iterator[str]:
    """Yield the sections whose charts are drawn, most important first."""
    yield _gain(metadata, plan, speedup)
    yield _over_the_steps(metadata, plan, drawn, run)
    yield _inside_a_step(metadata, plan, drawn)
    yield _waiting(plan.heat, drawn, idle_maps(plan, run)[1])
    yield _data_and_degrees(plan)
    yield _memory(metadata, plan, run)
    if "chart-scatter" in drawn and run is not None:
        yield _prediction(run)


def _gain(metadata: PlanMetadata, plan: PlanPicture, speedup: Speedup) -> str:
    ours, static = speedup.ours, speedup.static
    if ours is None or static is None or speedup.factor is None:
        return section("The gain over a static degree is not known", speedup.remark.capitalize() + ".", name="gain")
    title = f"{speedup.factor:.2f}x as fast as the best static degree"
    caption = (
        f"Predicted: {speedup.remark}. Below, the same sequences of step {ours.step}, a typical one, under the plan's "
        "recipe and on one time axis: "
        f"each colour is a degree, and blank space is a waiting rank.{plan.shown.in_words()}"
    )
    ranks = metadata.num_ranks
    parts = (
        f"<div><h3>{html.escape(name)}: {seconds(step.makespan_seconds)}, "
        f"ranks wait {step.idle_fraction(ranks):.1%}</h3>{figure(chart)}</div>"
        for name, step, chart in (
            (f"Static, degree {int(static.degrees.max())}", static, "chart-static"),
            (f"This plan, by {metadata.solver}", ours, "chart-ours"),
        )
    )
    return section(title, caption, *parts, name="gain")


def _over_the_steps(metadata: PlanMetadata, plan: PlanPicture, drawn: frozenset[str], run: RunPicture | None) -> str:
    caption = (
        "No schedule can beat the bound under this cost profile. If the cluster is faster than its profile, a measured "
        "step may lie below the bound."
    )
    if plan.every > 1:
        read = f"{plan.summary.steps:,} of {metadata.steps:,}"
        caption += f" The plan is large: this page reads each {plan.every}th step, {read}."
    if run is None or "chart-loss" not in drawn:
        return section("Step by step", caption, figure("chart-steps"))
    loss = "Summed token loss of the global batch / predicted tokens."
    if run.evaluations:
        loss += f" Held out: rows that are not trained on, in {counted(len(run.evaluations), 'evaluation')}."
    pair = side_by_side(part("Time of a step", "", "chart-steps"), part("Loss", loss, "chart-loss"))
    return section("Step by step", caption, pair)


def _inside_a_step(metadata: PlanMetadata, plan: PlanPicture, drawn: frozenset[str]) -> str:
    chosen, steps = plan.chosen_steps(), metadata.steps
    whole = (
        ""
        if len(chosen) == steps
        else f" {len(chosen)} of {steps:,} steps can be chosen; fcp inspect --step shows any."
    )
    has_measured = "chart-measured" in drawn
    axis = " Both charts have the same time axis." if has_measured else ""
    nodes = " Horizontal lines separate nodes." if plan.shown.node_lines() else ""
    caption = f"Which rank computes when; lines mark the ends.{nodes}{axis}{whole}{plan.shown.in_words()}"
    figures = figure("chart-gantt")
    if has_measured:
        figures = f"<h3>Planned</h3>{figures}<h3>Measured</h3>{figure('chart-measured')}"
    return section("Inside a step, rank by rank", caption, _picker(plan), figures)


def _picker(plan: PlanPicture) -> str:
    chosen, ends = plan.chosen_steps(), plan.ends()
    slowest, widest = (step.step for step in plan.worst_steps())
    options = []
    for step in sorted(chosen, key=lambda step: (step != slowest, step != widest, step)):
        marks = [name for name, worst in (("slowest", slowest), ("widest gap", widest)) if step == worst]
        makespan, bound = ends[step]
        label = f"step {step}: {makespan:.4g} s, gap {makespan / bound - 1:.1%}"
        options.append(f'<option value="{step}">{label}{" (" + ", ".join(marks) + ")" if marks else ""}</option>')
    return (
        '<div class="steps"><label for="step">Step</label>'
        f'<select id="step">{"".join(options)}</select>'
        '<button type="button" id="previous">Previous</button><button type="button" id="next">Next</button></div>'
    )


def _waiting(heat: HeatMap, drawn: frozenset[str], most: float) -> str:
    steps, ranks = -(-heat.steps // heat.columns), -(-heat.num_ranks // heat.rows)
    caption = "Share of each step in which a rank waits; a rank that computes all the time is blank."
    if steps > 1 or ranks > 1:
        caption += f" A cell is the mean of {_up_to(steps, 'step')} and {_up_to(ranks, 'rank')}."
    legend = f'<p class="ramp">0% <span></span> {most:.0%} of the step</p>'
    if "chart-waited" not in drawn:
        return section("Who waits", caption, legend, figure("chart-heat"))
    measured = "Gradient reduction and the optimizer count as waiting; warm-up steps are excluded."
    planned = part("Planned", "Between micro-batches, and for the slowest rank.", "chart-heat")
    return section("Who waits", caption, legend, side_by_side(planned, part("Measured", measured, "chart-waited")))


def _up_to(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else f"up to {counted(count, noun)}"


def _data_and_degrees(plan: PlanPicture) -> str:
    lengths = part(
        "Lengths",
        "Colours: the degree at which sequences run. Dashed lines: the longest sequence at degree 1, 2, 4, ...",
        "chart-lengths",
    )
    whole = f"<details><summary>All degrees in figures</summary>{_degree_table(plan)}</details>"
    degrees = part("Degrees", "How the work is divided among degrees.", "chart-mix", more=whole)
    return section("The data, and what runs at which degree", "", side_by_side(lengths, degrees))


def _degree_table(plan: PlanPicture) -> str:
    splits_heads = plan.metadata.attention is not None
    head = ("degree", "micro-batches", "tokens", "rank-seconds", "distinct groups")
    rows = []
    for degree, (_, tokens, time) in degree_shares(plan).items():
        totals = plan.summary.degrees[degree]
        groups = f"{len(plan.groups[degree]):,}" if degree in plan.groups else ""
        shapes = (totals.shapes(degree),) if splits_heads else ()
        rows.append((str(degree), f"{totals.microbatches:,}", f"{tokens:.1%}", f"{time:.1%}", groups, *shapes))
    return table((*head, "heads x ring") if splits_heads else head, rows)


def _memory(metadata: PlanMetadata, plan: PlanPicture, run: RunPicture | None) -> str:
    peers = plan.summary.peers
    memory = planned_memory(metadata, peers.most if peers is not None else 0)
    capacity = device_bytes(metadata)
    if memory is None or not capacity:
        most = f"{metadata.tokens_per_rank:,}"
        caption = f"Peak tokens of a rank in a micro-batch; the dashed line is the token budget, {most}."
        return section("Memory of each rank", caption, figure("chart-memory"))
    measured = " Orange: measured peak." if run is not None and run.peak_bytes.any() else ""
    caption = (
        f"In its largest micro-batch, against the {capacity / 1e9:.0f} GB that the job may use of a device (dashed)."
        f"{measured} {memory_sentence(metadata, memory)}"
    )
    return section("Memory of each rank", caption, figure("chart-memory"))


def _prediction(run: RunPicture) -> str:
    left_out = run.warm_up_steps
    warm_up = f"Excluded: {counted(left_out, 'warm-up step')}." if left_out else ""
    scatter = "Each dot is a micro-batch, by its slowest rank; the dashed line marks exact predictions."
    return section("Accuracy of predictions", f"{scatter} {warm_up}".rstrip(), figure("chart-scatter"))
