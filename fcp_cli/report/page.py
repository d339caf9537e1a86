"""The report as one self-contained HTML page.

Charts are Vega-Lite, drawn in the reader's browser as SVG; `vl-convert-python` brings the three JavaScript libraries
as one bundle of 0.9 MB (plotly.js would be 4.8 MB), so the page opens without a network and can be sent by mail.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fcp_cli.errors import FcpError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.report import charts
from fcp_cli.report.memory import memory_sentence, ranks_are_hosts
from fcp_cli.report.page_data import Columns, PlanPicture, joined
from fcp_cli.report.run_picture import RunPicture
from fcp_cli.words import counted

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Predicted gain over the best static plan: `factor` is None where it is not known, as `remark` explains."""

    factor: float | None
    remark: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the page.

    Attributes:
        name: of the plan file.
        plan: what was gathered from the plan.
        run: what was gathered from the metrics, if any.
        run_name: of the metrics file.
        speedup: over the best static plan.
        warnings: one line each, about inputs that could not be used whole.
    """

    name: str
    metadata: PlanMetadata
    plan: PlanPicture
    speedup: Speedup
    run: RunPicture | None = None
    run_name: str = ""
    warnings: list[str] = field(default_factory=list)

    def html(self) -> str:
        """Return the whole page."""
        meta, specs = self.metadata, dict(self._charts())
        made_by = f"fcp {meta.fcp_version}; plan hash {meta.plan_hash}"
        document = json.dumps({"config": charts.CONFIG, "charts": specs}, allow_nan=False, separators=(",", ":"))
        return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
            title=html.escape(f"Plan {self.name}" + (f" and run {self.run_name}" if self.run else "")),
            subtitle=html.escape(self._subtitle()),
            warnings="".join(f'<p class="warning">{html.escape(warning)}</p>' for warning in self.warnings),
            headline="".join(_card(*card) for card in self._headline()),
            sections="".join(self._sections(specs)),
            footer=html.escape(f"{made_by}; manifest {meta.manifest.name}; made {meta.created}"),
            library=javascript_bundle(),
            # A name in the plan that holds "</script" would end the script that the charts stand in.
            charts=document.replace("</", "<\\/"),
        )

    def figures(self) -> dict[str, Any]:
        """Return the headline as JSON values; totals are over the steps that were read."""
        summary = self.plan.summary
        measured = self.run.totals() if self.run is not None and not self.run.is_empty else None
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

    def _subtitle(self) -> str:
        meta = self.metadata
        return (
            f"{counted(meta.steps, 'step')} on {counted(meta.num_ranks, 'rank')}, {meta.ranks_per_node} per node, "
            f"at most {counted(meta.tokens_per_rank, 'token')} each; "
            f"planned by {meta.solver}, sync {meta.sync}, seed {meta.seed}."
        )

    def _headline(self) -> Iterator[tuple[str, str, str]]:
        summary = self.plan.summary
        slowest, _ = self.plan.worst_steps()
        yield (
            "step time",
            f"{summary.mean_step_seconds:.4g} s",
            f"slowest {slowest.makespan_seconds:.4g} s, step {slowest.step}",
        )
        yield "gap", f"{summary.gap:.2%}", f"over the lower bound of {summary.bound_seconds / summary.steps:.4g} s"
        yield "idle", f"{summary.idle_fraction:.2%}", "of all rank-seconds"
        rate = summary.tokens / summary.makespan_seconds
        yield "tokens/s", f"{rate:,.0f}", f"{rate / self.metadata.num_ranks:,.0f} per rank"
        speedup = self.speedup
        yield "speed-up", "not known" if speedup.factor is None else f"{speedup.factor:.2f}x", speedup.remark
        yield "distinct groups", f"{self.metadata.distinct_groups:,}", "of degree over 1"
        if summary.peers is not None:
            takes = "" if ranks_are_hosts(self.metadata) else f"; about {summary.peers.most_bytes / 1e9:.1f} GB"
            yield "most peers", f"{summary.peers.most}", f"of a rank; mean {summary.peers.mean:.1f}{takes}"
        if self.run is not None and not self.run.is_empty:
            totals = self.run.totals()
            yield "measured step time", f"{totals['step_seconds']:.4g} s", "median, without warm-up"
            yield "measured / predicted", f"{totals['ratio']:.3f}", "over all steps"
            yield "measured idle", f"{totals['idle']:.2%}", "with gradient sums and the optimizer"
            yield "measured tokens/s", f"{totals['tokens_per_second']:,.0f}", "whole job"

    def _charts(self) -> Iterator[tuple[str, charts.Spec]]:
        plan, ranks, colours = self.plan, self.metadata.num_ranks, charts.DegreeColours(self.plan.summary.degrees)
        measured = self.run is not None and not self.run.is_empty
        drift = self.run.drift() if self.run is not None and measured else None
        yield "chart-steps", charts.step_chart(plan.step_series(), drift)
        chosen = plan.chosen_steps()
        first = plan.worst_steps()[0].step
        options: dict[str, Any] = {"num_ranks": ranks, "first": first}
        yield "chart-gantt", charts.gantt_chart(joined([*chosen.values()]), self._step_ends(), colours, **options)
        if self.run is not None and self.run.bars:
            bars = joined([*self.run.bars.values()])
            yield "chart-measured", charts.gantt_chart(bars, self._step_ends(), colours, **options)
        yield "chart-heat", charts.heat_chart(plan.heat.cells(), num_ranks=ranks)
        most, tokens = self.metadata.tokens_per_rank, plan.degree_boundaries()
        boundaries: Columns = {"tokens": tokens, "label": [str(each // most) for each in tokens.tolist()]}
        yield "chart-lengths", charts.length_chart(plan.length_bars(), boundaries, colours)
        yield "chart-mix", charts.mix_chart(self._mix(), colours)
        yield "chart-memory", charts.memory_chart(plan.peak_bars(), tokens_per_rank=most, num_ranks=ranks)
        if self.run is not None and drift is not None:
            yield "chart-scatter", charts.scatter_chart(self.run.scatter(), colours)
            yield "chart-residuals", charts.residual_chart(self.run.residuals())
            yield "chart-drift", charts.drift_chart(drift)
            yield "chart-slowest", charts.slowest_chart(self.run.slowest_ranks())

    def _step_ends(self) -> Columns:
        """Return the lines of the Gantt charts: a step's lower bound, its planned end, and its measured one."""
        ends, measured = self.plan.ends(), self.run.ends if self.run is not None else {}
        rows = []
        for step in self.plan.chosen_steps():
            planned, bound = ends[step]
            rows += [(step, bound, "lower bound"), (step, planned, "planned end")]
            rows += [(step, measured[step], "measured end")] if step in measured else []
        steps, at, what = zip(*rows, strict=True)
        return {"step": np.array(steps), "at": np.array(at), "what": list(what)}

    def _mix(self) -> Columns:
        rows = [(degree, *shares) for degree, shares in self._shares().items()]
        names = ("micro-batches", "tokens", "rank-seconds")
        return {
            "degree": np.repeat(np.array([row[0] for row in rows]), len(names)),
            "measure": [*names] * len(rows),
            "share": np.array([share for row in rows for share in row[1:]], dtype=np.float64),
        }

    def _shares(self) -> dict[int, tuple[float, float, float]]:
        """Return the shares of micro-batches, tokens and rank-seconds of each degree."""
        summary = self.plan.summary
        return {
            degree: (
                totals.microbatches / max(summary.microbatches, 1),
                totals.tokens / max(summary.tokens, 1),
                totals.rank_seconds / (summary.busy_rank_seconds or 1.0),
            )
            for degree, totals in sorted(summary.degrees.items())
        }

    def _sections(self, specs: Mapping[str, charts.Spec]) -> Iterator[str]:
        caption = "Planned seconds of each step and the seconds that no schedule can beat."
        if self.plan.every > 1:
            read = f"{self.plan.summary.steps:,} of {self.metadata.steps:,}"
            caption += f" The plan is large: this page reads each {self.plan.every}th step, {read}."
        yield _section("Steps", caption, "chart-steps")
        yield self._gantt_section("chart-measured" in specs)
        heat = self.plan.heat
        steps, ranks = -(-heat.steps // heat.columns), -(-heat.num_ranks // heat.rows)
        caption = "Share of each step in which a rank waits. "
        if steps > 1 or ranks > 1:
            caption += f"A cell is the mean of {_up_to(steps, 'step')} and {_up_to(ranks, 'rank')}."
        yield _section("Idle time", caption, "chart-heat")
        yield '<div class="pair">'
        caption = "Colours: the degree at which sequences run. Dashed lines: what degree 1, 2, 4, ... can hold at most."
        yield _section("Lengths", caption, "chart-lengths")
        most = f"{self.metadata.tokens_per_rank:,}"
        caption = f"Most tokens that a rank holds in one micro-batch; the dashed line is the token budget, {most}."
        peers = self.plan.summary.peers
        caption += memory_sentence(self.metadata, peers.most if peers is not None else 0)
        yield _section("Memory", caption, "chart-memory")
        yield "</div>"
        yield _section("Degrees", "How the work divides over the degrees.", "chart-mix", self._degree_table())
        if "chart-scatter" in specs:
            yield from self._run_sections()

    def _run_sections(self) -> Iterator[str]:
        assert self.run is not None
        left_out = self.run.warm_up_steps
        warm_up = f" Left out: {counted(left_out, 'warm-up step')}." if left_out else ""
        yield '<div class="pair">'
        caption = (
            "Each dot is a micro-batch, by its slowest rank; on the dashed line the prediction is right." + warm_up
        )
        yield _section("Predicted and measured", caption, "chart-scatter")
        yield _section(
            "Residuals",
            "Per degree: 10th to 90th percentile (line), quartiles (bar) and median (dot).",
            "chart-residuals",
        )
        caption = "Whole steps also hold waiting, gradient sums and the optimizer; micro-batches alone do not."
        yield _section("Drift", caption, "chart-drift")
        caption = "Measured over predicted seconds of all that a rank ran. Members of a ring slow each other down."
        yield _section("Slowest ranks", caption, "chart-slowest")
        yield "</div>"

    def _gantt_section(self, has_measured: bool) -> str:
        chosen, seconds = self.plan.chosen_steps(), self.plan.ends()
        slowest, widest = (step.step for step in self.plan.worst_steps())
        options = []
        for step in sorted(chosen, key=lambda step: (step != slowest, step != widest, step)):
            marks = [name for name, worst in (("slowest", slowest), ("widest gap", widest)) if step == worst]
            makespan, bound = seconds[step]
            label = f"step {step}: {makespan:.4g} s, gap {makespan / bound - 1:.1%}"
            options.append(f'<option value="{step}">{label}{" (" + ", ".join(marks) + ")" if marks else ""}</option>')
        steps = self.metadata.steps
        whole = (
            "" if len(chosen) == steps else f" {len(chosen)} of {steps:,} steps can be chosen here; fcp trace has all."
        )
        picker = (
            '<div class="steps"><label for="step">Step</label>'
            f'<select id="step">{"".join(options)}</select>'
            '<button type="button" id="previous">Previous</button><button type="button" id="next">Next</button></div>'
        )
        axis = " Both charts have the same time axis." if has_measured else ""
        caption = f"Who computes when; lines mark the ends.{axis}{whole}"
        figures = _figure("chart-gantt")
        if has_measured:
            figures = f"<p>Planned</p>{figures}<p>Measured</p>{_figure('chart-measured')}"
        return f"<section><h2>One step, rank by rank</h2><p>{caption}</p>{picker}{figures}</section>"

    def _degree_table(self) -> str:
        head = "".join(
            f"<th>{name}</th>" for name in ("degree", "micro-batches", "tokens", "rank-seconds", "distinct groups")
        )
        rows = []
        for degree, (_, tokens, seconds) in self._shares().items():
            microbatches = self.plan.summary.degrees[degree].microbatches
            groups = f"{len(self.plan.groups[degree]):,}" if degree in self.plan.groups else ""
            cells = (str(degree), f"{microbatches:,}", f"{tokens:.1%}", f"{seconds:.1%}", groups)
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _up_to(count: int, what: str) -> str:
    return f"one {what}" if count == 1 else f"up to {counted(count, what)}"


def _card(label: str, value: str, remark: str) -> str:
    return f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"


def _section(title: str, caption: str, chart: str, more: str = "") -> str:
    return f"<section><h2>{title}</h2><p>{html.escape(caption)}</p>{_figure(chart)}{more}</section>"


def _figure(chart: str) -> str:
    return f'<figure><div class="chart" id="{chart}"></div></figure>'


@cache
def javascript_bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Raises:
        FcpError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise FcpError("fcp report needs vl-convert-python: pip install 'fcp-cli[report]'") from error
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
