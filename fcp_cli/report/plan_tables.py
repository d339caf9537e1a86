"""Prints plans as tables of 80 columns: the entire plan, or one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fcp_cli.console import bar, new_table, print_table
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import refit_text
from fcp_cli.plan.peers import PeerCount
from fcp_cli.plan.pricing.speeds import speeds_text
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.report.memory import ranks_are_hosts
from fcp_cli.words import counted, ranges

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BAR_COLUMNS = 24
_MOST_RANKS_SHOWN = 64


def print_plan(
    console: Console, metadata: PlanMetadata, summary: PlanSummary, *, extra: Mapping[str, str] | None = None
) -> None:
    """Print a plan: headline figures, then time by degree."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for label, text in {**_headline(metadata, summary), **(extra or {})}.items():
        table.add_row(f"[bold]{label}[/]", text)
    console.print(table)
    print_table(console, _degree_table(summary, console.options.ascii_only))


def speedup_text(speedup: float, static_degree: int, sampled: int, steps: int) -> str:
    """Describe the predicted gain over the best static plan, and on which steps."""
    where = "" if sampled == steps else f", on {sampled} of {steps} steps"
    return f"{speedup:.2f}x over the best static plan (degree {static_degree}{where})"


def _headline(metadata: PlanMetadata, summary: PlanSummary) -> dict[str, str]:
    each = counted(metadata.tokens_per_rank, "token")
    shape = f"{counted(metadata.num_ranks, 'rank')}, {metadata.ranks_per_node} per node, {each} each"
    unit = f"multiples of {metadata.padding_multiple} x degree"
    padding = f"{summary.padding_fraction:.2%} more tokens, with sequences padded to {unit}"
    over = metadata.overlong
    verb = "dropped" if over.policy == "drop" else "cut"
    left_out = f"; {over.sequences:,} over {over.max_length:,} {verb}" if over.sequences else ""
    passes = "" if metadata.phase is None else " of forward passes"
    made = f"by {metadata.solver}, sync {metadata.sync}, seed {metadata.seed}"
    lines = {
        "plan": f"{counted(summary.steps, 'step')}{passes} {made}",
        "ranks": shape,
        **({"devices": devices_text(metadata)} if metadata.devices_per_rank > 1 else {}),
        **({"recipe": metadata.recipe.describe()} if metadata.recipe is not None else {}),
        "sequences": f"{summary.sequences:,} with {counted(summary.tokens, 'token')}{left_out}",
        **_encoder_line(metadata),
        **({"padding": padding} if metadata.padding_multiple is not None else {}),
        "step time": f"{summary.mean_step_seconds:.4g} s mean, slowest {summary.slowest_step_seconds:.4g} s "
        f"(step {summary.slowest_step})",
        "gap": f"{summary.gap:.2%} over the lower bound of {summary.bound_seconds / max(summary.steps, 1):.4g} s",
        "idle": f"{summary.idle_fraction:.2%} of all rank-seconds",
        **({} if summary.bubble_fraction is None else {"bubble": _bubble_text(summary.bubble_fraction, metadata)}),
        "groups": f"{counted(metadata.distinct_groups, 'distinct group')} of degree > 1",
    }
    if summary.peers is not None:
        lines["peers"] = peers_text(summary.peers, on_hosts=ranks_are_hosts(metadata))
    if metadata.continues is not None:
        before = metadata.continues
        lines["continues"] = f"{before.num_ranks} ranks under {before.plan_hash[:16]}, from step {before.first_step} on"
    if metadata.solver_options:
        lines["options"] = ", ".join(f"{name} {value}" for name, value in metadata.solver_options.items())
    if metadata.rank_speeds:
        lines["speeds"] = speeds_text(metadata.rank_speeds)
    if metadata.refits:
        last = metadata.refits[-1]
        lines["refits"] = f"{len(metadata.refits)}, the last from step {last.first_step} on: {refit_text(last)}"
    lines["hash"] = metadata.plan_hash[:16]
    return lines


def _bubble_text(fraction: float, metadata: PlanMetadata) -> str:
    blocks = f" of {metadata.virtual_stages} blocks" if metadata.virtual_stages > 1 else ""
    stages = f"{metadata.pipeline_parallel} stages{blocks}"
    return f"{fraction:.2%} of the step, in which even the busiest rank waits for its {stages}"


def _encoder_line(metadata: PlanMetadata) -> dict[str, str]:
    said = ["balanced over all ranks of a wave"] if metadata.encoder_balance is not None else []
    if metadata.encoder_ranks is not None:
        said = [f"on {counted(metadata.encoder_ranks, 'rank')} of its own, before the others"]
    return {"encoder": ", ".join(said)} if said else {}


def peers_text(peers: PeerCount, *, on_hosts: bool) -> str:
    """Describe peers per rank, their memory, and whether the number still grows."""
    first = peers.means()[0] if peers.new_pairs else 0.0
    grown = f" ({first:.1f} after one step)" if len(peers.new_pairs) > 1 else ""
    takes = "" if on_hosts else f", about {peers.most_bytes / 1e9:.1f} GB of its device"
    return f"{peers.mean:.1f} per rank{grown}, at most {peers.most}{takes}"


def devices_text(metadata: PlanMetadata) -> str:
    """Describe the devices of a plan's ranks."""
    return (
        f"{metadata.devices_per_rank} per rank (tensor parallel {metadata.tensor_parallel}, pipeline parallel "
        f"{metadata.pipeline_parallel}), {metadata.num_devices:,} in all"
    )


def _degree_table(summary: PlanSummary, ascii_only: bool) -> Table:
    """Tabulate each degree's share of micro-batches, tokens and rank-seconds."""
    splits_heads = any(totals.heads_degrees for totals in summary.degrees.values())
    last = "heads x ring" if splits_heads else ""
    table = new_table("degree", "micro-batches", "tokens", "rank-seconds", last, left=(4,))
    total_tokens, busy = max(summary.tokens, 1), summary.busy_rank_seconds or 1.0
    for degree, totals in sorted(summary.degrees.items()):
        share = totals.rank_seconds / busy
        table.add_row(
            str(degree),
            f"{totals.microbatches:,}",
            f"{totals.tokens / total_tokens:.1%}",
            f"{share:.1%}",
            totals.shapes(degree) if splits_heads else bar(share, _BAR_COLUMNS, ascii_only=ascii_only),
        )
    return table


def print_step(console: Console, metadata: PlanMetadata, step: StepPlan) -> None:
    """Print a step: its micro-batches in order, then a bar per rank."""
    console.print(
        f"[bold]step {step.step}[/]: {step.makespan_seconds:.4g} s, lower bound {step.bound_seconds:.4g} s, "
        f"gap {step.gap:.2%}, idle {step.idle_fraction(metadata.num_ranks):.2%}"
    )
    print_table(console, _step_table(step, metadata.sync == "microbatch"))
    print_table(console, _rank_table(step, metadata.num_ranks, console.options.ascii_only))


def _step_table(step: StepPlan, has_waves: bool) -> Table:
    names = ["order", *(["wave"] if has_waves else []), "degree", "ranks"]
    table = new_table(*names, "seqs", "tokens", "longest", "start", "seconds", left=(len(names) - 1,))
    for microbatch in step.microbatches():
        if not microbatch.is_idle:
            table.add_row(*_step_cells(microbatch, has_waves))
    return table


def _step_cells(microbatch: MicroBatch, has_waves: bool) -> Iterator[str]:
    yield str(microbatch.order)
    if has_waves:
        yield str(microbatch.wave)
    yield microbatch.described_degree
    yield ranges(microbatch.ranks)
    yield str(len(microbatch.sequences))
    yield f"{microbatch.tokens:,}"
    yield f"{max(microbatch.lengths):,}"
    yield f"{microbatch.start_seconds:.3f}"
    yield f"{microbatch.seconds:.3f}"


def _rank_table(step: StepPlan, num_ranks: int, ascii_only: bool) -> Table:
    """Tabulate how long each rank computes; only the idlest ranks if there are many."""
    busy = step.busy_seconds(num_ranks)
    microbatches = [0] * num_ranks
    for microbatch in step.microbatches():
        for rank in microbatch.ranks if not microbatch.is_idle else ():
            microbatches[rank] += 1
    shown, caption = list(range(num_ranks)), None
    if num_ranks > _MOST_RANKS_SHOWN:
        shown = sorted(sorted(shown, key=lambda rank: busy[rank])[:_MOST_RANKS_SHOWN])
        caption = f"the {_MOST_RANKS_SHOWN} idlest of {num_ranks} ranks; --json has all"
    names = ("rank", "micro-batches", "busy s", "idle s", "")
    table = new_table(*names, left=(4,), caption=caption, caption_justify="left")
    for rank in shown:
        share = float(busy[rank]) / step.makespan_seconds
        idle = step.makespan_seconds - float(busy[rank])
        table.add_row(
            str(rank),
            str(microbatches[rank]),
            f"{busy[rank]:.3f}",
            f"{idle:.3f}",
            bar(share, _BAR_COLUMNS, ascii_only=ascii_only),
        )
    return table


def step_document(step: StepPlan, num_ranks: int) -> dict[str, Any]:
    """Return a step for `--json`."""
    return {
        "step": step.step,
        "makespan_seconds": step.makespan_seconds,
        "bound_seconds": step.bound_seconds,
        "gap": step.gap,
        "idle_fraction": step.idle_fraction(num_ranks),
        "busy_seconds": step.busy_seconds(num_ranks).tolist(),
        "micro_batches": [
            {
                "order": microbatch.order,
                "wave": microbatch.wave,
                "degree": microbatch.degree,
                **({} if step.heads_degree is None else {"heads_degree": microbatch.heads_degree}),
                "ranks": list(microbatch.ranks),
                "sequences": list(microbatch.sequences),
                "lengths": list(microbatch.lengths),
                "tokens": microbatch.tokens,
                "start_seconds": microbatch.start_seconds,
                "seconds": microbatch.seconds,
            }
            for microbatch in step.microbatches()
        ],
    }
