"""Prints plans as tables of 80 columns: the entire plan, or one step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.errors import PlanError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata, refit_text, refitted
from fcp_cli.plan.pricing import step_prices
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.setup import Pipeline, Prices, speeds_text
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.planning.batches import planned_manifest
from fcp_cli.report.profiles import ranks_are_hosts
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.console import bar, new_table, print_table
from fcp_cli.util.files import as_word
from fcp_cli.util.words import counted, ranges

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


def speedup_text(metadata: PlanMetadata, speedup: float | None) -> str:
    """Describe the predicted gain over the best static plan, and on which steps."""
    if speedup is None or metadata.baselines is None:
        return "not known: only 'fcp plan' prices the static plan"
    static = next(one.label for one in metadata.baselines.strategies if one.name == "static")
    compared = len(metadata.baselines.steps)
    where = "" if compared == metadata.steps else f", on {compared} of {metadata.steps:,} steps"
    return f"{speedup:.2f}x over the best static plan ({static.removeprefix('static ')}{where})"


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
    return f"{peers.mean:.1f} per rank{grown}, at most {peers.most}{takes}" if peers.most else "none"


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


_QUICK_BYTES = 100_000_000  # hashing a larger file would take too long to show one step


@dataclass(kw_only=True, slots=True)
class PlanFile:
    """An open plan, read tolerantly for display; `plan.check` verifies a plan strictly.

    Attributes:
        problems: one line per edit or skipped step; complete once `steps` is exhausted.
    """

    reader: PlanReader
    problems: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def metadata(self) -> PlanMetadata:
        return self.reader.metadata

    def steps(self, first: int = 0) -> Generator[StepPlan, None, None]:
        """Yield the displayable steps from `first` on, in order."""
        left_out, reason, before = 0, "", first - 1
        try:
            for step, broken in self.reader.stored_steps(first):
                fault = "out of order" if step.step <= before else _unseen(step, self.metadata)
                if broken is None and fault is None:
                    before = step.step
                    yield step
                else:
                    reason = reason or str(broken or f"step {step.step}: {fault}")
                    left_out += 1
        finally:  # also if the caller stops early
            if left_out:
                more = f", and {left_out - 1} more" if left_out > 1 else ""
                self.problems.append(f"{self.path}: skipped {reason}{more}")

    def step(self, wanted: int) -> StepPlan:
        """Return a step."""
        with closing(self.steps(wanted)) as steps:
            found = next((step for step in steps if step.step == wanted), None)
        if found is None:
            raise self.nothing_to_show(f"step {wanted}")
        return found

    def manifest(self, paths: Sequence[Path]) -> LengthTable | None:
        """Read the manifests of this plan, or return None without a path."""
        if not paths:
            return None
        table, planned = planned_manifest(self.metadata, paths, length_column="length"), self.metadata.manifest
        if len(table) != planned.rows:
            raise PlanError(
                f"--manifest {paths[0]} has {counted(len(table), 'row')}, but {self.path} was planned from "
                f"{counted(planned.rows, 'row')} of {planned.name}; name that one"
            )
        return table

    def nothing_to_show(self, noun: str = "step") -> PlanError:
        """Return the error for a plan without a displayable `noun`, with the latest reason."""
        left_out = [problem.partition("skipped ")[2] for problem in self.problems if "skipped " in problem]
        reason = f" ({left_out[-1]})" if left_out else ""
        return PlanError(f"{self.path} has no displayable {noun}{reason}; see: fcp check {as_word(self.path)}")


def open_plan(path: Path, *, quickly: bool = False) -> PlanFile:
    """Open a plan; if its content does not match its hash, `problems` says so.

    Args:
        path: the plan.
        quickly: skip hashing if the file is large.
    """
    plan = PlanFile(reader=PlanReader(path))
    if quickly and path.stat().st_size > _QUICK_BYTES:
        return plan
    stated = plan.metadata.plan_hash
    if plan.reader.content_hash() != stated:
        plan.problems.append(f"{path} was edited: its hash was {stated[:12]}; see: fcp check {as_word(path)}")
    return plan


def _unseen(step: StepPlan, metadata: PlanMetadata) -> str | None:
    """Return why a valid step cannot be displayed, or None."""
    if not metadata.first_step <= step.step < metadata.end_step:
        return f"the plan ends with step {metadata.end_step - 1}"
    if min(step.makespan_seconds, step.bound_seconds) <= 0:
        return "it takes no time"
    return None


_MOST_RANKS = 512  # more rows would not be visible and would bloat the page
_MOST_NODE_LINES = 33


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksShown:
    """All ranks of a small job, or the ranks of each `every`-th node of a large one, in adjacent rows."""

    num_ranks: int
    ranks_per_node: int
    every: int = 1

    @classmethod
    def of(cls, num_ranks: int, ranks_per_node: int) -> RanksShown:
        """Select evenly spaced nodes with about 512 ranks in total."""
        nodes = -(-num_ranks // ranks_per_node)
        every = max(1, -(-nodes // max(1, _MOST_RANKS // ranks_per_node)))
        return cls(num_ranks=num_ranks, ranks_per_node=ranks_per_node, every=every)

    @classmethod
    def all_of(cls, metadata: PlanMetadata) -> RanksShown:
        """Select all ranks of a plan."""
        return cls(num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node)

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.are_shown(np.arange(self.num_ranks)).sum())

    def are_shown(self, ranks: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each of these ranks has a row."""
        return np.asarray(ranks // self.ranks_per_node % self.every == 0)

    def rows(self, ranks: IntArray) -> IntArray:
        """Return the row of each displayed rank."""
        node = ranks // self.ranks_per_node // self.every
        return np.asarray(node * self.ranks_per_node + ranks % self.ranks_per_node, dtype=np.int64)

    def node_lines(self) -> list[int]:
        """Return the first row of each further node; [] if there are too many."""
        lines = list(range(self.ranks_per_node, self.count, self.ranks_per_node))
        return lines if len(lines) < _MOST_NODE_LINES else []

    def axis(self, most: int) -> dict[str, Any]:
        """Return an axis with at most `most` ticks, each at the middle of a displayed rank's row."""
        per_node = self.ranks_per_node
        strides = [s for s in (1, 2, 4, 8, 16, 32) if s < per_node and per_node % s == 0]
        strides += [per_node * 2**k for k in range(20)]
        stride = next(s for s in strides if self.count <= most * s)
        rank = f"floor(datum.value / {per_node}) * {per_node * self.every} + floor(datum.value) % {per_node}"
        return {
            "values": [row + 0.5 for row in range(0, self.count, stride)],
            "labelExpr": f"format({rank}, ',')",
            "labelOverlap": False,
            "grid": False,
            "ticks": False,
        }

    def in_words(self) -> str:
        """Describe omitted ranks for a caption; "" if all are shown."""
        if self.every == 1:
            return ""
        return f" {self.count:,} of {self.num_ranks:,} ranks are drawn: one node in {self.every}."


class StageTimes(NamedTuple):
    """Start and duration of each micro-batch in each block of layers, in seconds: [micro-batches, blocks].

    With P stages, block b is on stage b % P.
    """

    forward_start: FloatArray
    backward_start: FloatArray
    forward_seconds: FloatArray
    backward_seconds: FloatArray


def stage_times(step: StepPlan, metadata: PlanMetadata, pipeline: Pipeline) -> StageTimes:
    """Simulate a pipelined step as planned; seconds not explained by lengths count as encoder time."""
    stages, prices = metadata.pipeline_parallel, _prices(step, metadata)
    run = pipeline.run(step.rank_offsets, step.ranks, prices, stages=stages, num_ranks=metadata.num_ranks)
    forward, backward, _sends = pipeline.block_seconds(prices, stages)
    return StageTimes(run.forward_start, run.backward_start, forward, backward)


def step_seconds_with(step: StepPlan, order: int, seconds: float, metadata: PlanMetadata, pipeline: Pipeline) -> float:
    """Return the duration of a pipelined step if one micro-batch took `seconds`."""
    prices = _prices(step, metadata)
    ends = []
    for factor in (1.0, seconds / float(step.seconds[order])):
        scale = np.ones(len(step))
        scale[order] = factor
        changed = Prices(prices.seconds * scale, *(None if part is None else part * scale for part in prices[1:3]))
        changed = changed._replace(rank_tokens=prices.rank_tokens)
        run = pipeline.run(
            step.rank_offsets, step.ranks, changed, stages=metadata.pipeline_parallel, num_ranks=metadata.num_ranks
        )
        ends.append(run.makespan_seconds)
    return step.makespan_seconds + ends[1] - ends[0]


def stage_bars(
    step: StepPlan, shown: RanksShown, metadata: PlanMetadata, pipeline: Pipeline
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the columns of `page_data.bars_of` for a pipelined step: a rectangle per forward and backward of a stage.

    Each rank's row is split by stage.
    """
    stages = metadata.pipeline_parallel
    times = stage_times(step, metadata, pipeline)
    rows = np.repeat(np.arange(len(step)), step.degrees)
    wanted = shown.are_shown(step.ranks.astype(np.int64)) & (step.tokens[rows] > 0)
    rows, ranks = rows[wanted], shown.rows(step.ranks.astype(np.int64)[wanted])
    blocks = times.forward_start.shape[1]
    row, block = np.repeat(rows, blocks), np.tile(np.arange(blocks), len(rows))
    top = np.repeat(ranks, blocks) + (block % stages) / stages
    starts = (times.forward_start[row, block], times.backward_start[row, block])
    both = [np.concatenate(pair) for pair in ((row, row), (top, top), starts)]
    lasts = np.concatenate((times.forward_seconds[row, block], times.backward_seconds[row, block]))
    return {
        "step": np.full(len(both[0]), step.step),
        "order": both[0],
        "degree": step.degrees[both[0]],
        "tokens": step.tokens[both[0]],
        "rank": both[1],
        "top": both[1] + 1 / stages,
        "start": both[2],
        "end": both[2] + lasts,
    }


def _prices(step: StepPlan, metadata: PlanMetadata) -> Prices:
    profile = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
    found = step_prices(
        step,
        metadata,
        profile=refitted(profile, metadata.refit_at(step.step)),
        rank_speeds=metadata.speeds_at(step.step),
    )
    encoder = np.maximum(step.seconds - found.seconds, 0.0)
    return found._replace(seconds=step.seconds, encoder_seconds=encoder)
