"""The sections of the page, most important first."""

from __future__ import annotations

import html
from collections.abc import Iterator

from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.report.memory import memory_sentence, planned_memory
from fcp_cli.report.page.page_charts import Speedup, degree_shares, device_bytes, idle_maps
from fcp_cli.report.page.page_data import HeatMap, PlanPicture
from fcp_cli.report.page.page_parts import figure, part, seconds, section, side_by_side, table
from fcp_cli.report.page.run_picture import RunPicture
from fcp_cli.words import counted


def sections_of(
    metadata: PlanMetadata, plan: PlanPicture, run: RunPicture | None, speedup: Speedup, drawn: frozenset[str]
) -> Iterator[str]:
    """Yield the sections whose charts are drawn."""
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
        f"Predicted, {speedup.remark}. Below, the same sequences of step {ours.step}, a typical one, on one time axis: "
        f"each colour is a degree, and blank space is a waiting rank.{plan.shown.in_words()}"
    )
    ranks = metadata.num_ranks
    parts = (
        f"<div><h3>{html.escape(name)}: {seconds(step.makespan_seconds)}, "
        f"ranks wait {step.idle_fraction(ranks):.1%}</h3>{figure(chart)}</div>"
        for name, step, chart in (
            (f"Static, degree {speedup.degree}", static, "chart-static"),
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
