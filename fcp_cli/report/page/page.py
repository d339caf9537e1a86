"""The report as a self-contained HTML page.

Vega-Lite charts are rendered as SVG in the browser. `vl-convert-python` provides the JavaScript libraries as a 0.9 MB
bundle (plotly.js would be 4.8 MB), so the page works offline and can be mailed.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Any

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.errors import FcpError
from fcp_cli.extras import pip_install
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.report.memory import planned_memory
from fcp_cli.report.page.chart_parts import CONFIG
from fcp_cli.report.page.page_charts import Speedup, charts_of, has_measured_steps
from fcp_cli.report.page.page_data import PlanPicture
from fcp_cli.report.page.page_parts import facts, seconds, table
from fcp_cli.report.page.page_sections import sections_of
from fcp_cli.report.page.run_picture import RunPicture
from fcp_cli.runs.metrics.metrics_record import RunRecord
from fcp_cli.words import counted

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
