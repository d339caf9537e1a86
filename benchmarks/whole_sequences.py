"""What it would save to leave short sequences whole inside a ring's pack: `python -m benchmarks.whole_sequences`.

A ring splits every sequence of its pack over all members. One that a member could hold alone needs no hop if it stays
there, but then members hold different sequences, and a ring is as slow as the member that has most to do.

Per family and sync, of the packs that `fcp` plans:

- in rings: the share of all tokens whose group has more than one rank.
- fit: of these, the share in sequences no longer than what a member holds.
- kept: the share that can stay whole while no member gets more tokens or attention than the others by `--slack`.
- faster: how much of the predicted step goes if all that fit stay whole and balance did not matter, which no way of
  choosing them can beat; with rings that attention hides, and with a share of them that nothing hides.

A planner that knew of whole sequences could choose other packs, which is not tried here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.workloads import FAMILIES, MAX_LENGTH, example_profile, family_table, real_table
from fcp_cli.cost.formula import overlapped_seconds, pack_parts
from fcp_cli.cost.model import group_terms, unit_prices
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import crosses_nodes, planned_sequences, single_rank_work, step_times
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.arrays import IntArray

RANKS, PER_NODE, SEQUENCES = 64, 8, 512
SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")


@dataclass(kw_only=True)
class Found:
    """Sums over the steps of one family under one sync."""

    tokens: int = 0
    ring_tokens: int = 0
    fitting_tokens: int = 0
    kept_tokens: int = 0
    seconds: float = 0.0
    seconds_without: float = 0.0


def keepable(lengths: IntArray, degree: int, *, slack: float, break_even_tokens: float) -> IntArray:
    """Which sequences can stay whole on members that remain balanced: [kept] indices.

    The longest go to the member with the fewest tokens first; where that leaves members uneven, the longest of all are
    split after all, and the rest is tried again.

    Args:
        lengths: of the pack's sequences.
        degree: members of the ring.
        slack: most that a member may have above the mean, as a share of the tokens that it holds.
        break_even_tokens: length at which attention costs as much as the rest, which makes attention comparable.
    """
    share = int(lengths.sum()) / degree
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] <= share]
    for first in range(len(order)):
        kept = order[first:]
        tokens, work = np.zeros(degree), np.zeros(degree)
        for length in lengths[kept].tolist():
            member = int(np.argmin(tokens))
            tokens[member] += length
            work[member] += length + length**2 / break_even_tokens
        if all(load.max() - load.mean() <= slack * share for load in (tokens, work)):
            return kept
    return order[:0]


def planned(table: LengthTable, problem: Problem, steps: int, *, shuffle: bool) -> Iterator[StepPlan]:
    """The steps that `fcp` plans."""
    settings = BatchSettings(
        global_batch_size=SEQUENCES, shuffle=shuffle, step_limit=steps, max_length=MAX_LENGTH, overlong="truncate"
    )
    batches = GlobalBatches(table, problem, settings)
    solver = make_solver("fcp", batches)
    for batch in batches:
        yield assemble(solver.assign(batch), batch, problem)


def measure(steps: Iterator[StepPlan], problem: Problem, *, slack: float) -> Found:
    """Count what could stay whole in these steps, and price them without the rings of what fits."""
    found = Found()
    c = problem.profile.coefficients
    break_even = c.linear_seconds_per_token / c.attention_seconds_per_token2
    for step in steps:
        fitting = np.zeros(len(step), dtype=np.int64)
        for i, row in enumerate(step.microbatches()):
            found.tokens += row.tokens
            if row.degree > 1:
                lengths = np.array(row.lengths)
                fitting[i] = lengths[lengths <= row.tokens / row.degree].sum()
                kept = keepable(lengths, row.degree, slack=slack, break_even_tokens=break_even)
                found.ring_tokens += row.tokens
                found.kept_tokens += int(lengths[kept].sum())
        found.fitting_tokens += int(fitting.sum())
        found.seconds += step.makespan_seconds
        found.seconds_without += makespan_without(step, fitting, problem)
    return found


def makespan_without(step: StepPlan, whole_tokens: IntArray, problem: Problem) -> float:
    """Makespan of a step whose rings do not carry [microbatches] `whole_tokens`; members stay as balanced."""
    profile = problem.profile
    degrees = step.degrees.astype(np.float64)
    crossing = crosses_nodes(step.rank_offsets, step.ranks, problem.ranks_per_node)
    terms, prices = group_terms(profile, degree=degrees, crosses_nodes=crossing), unit_prices(profile)
    work = single_rank_work(planned_sequences(step, None), profile, None)
    owner = np.repeat(np.arange(len(step)), np.diff(step.sequence_offsets))
    attention = np.bincount(owner, work.attention_seconds, len(step))
    now, then = (
        overlapped_seconds(pack_parts(attention, 0.0, tokens, degrees, terms, prices))
        for tokens in (step.tokens, step.tokens - whole_tokens)
    )
    seconds = step.seconds - np.where(step.is_idle, 0.0, now - then)
    starts = step_times(
        problem.sync,
        wave=step.wave,
        rank_offsets=step.rank_offsets,
        ranks=step.ranks,
        seconds=seconds,
        num_ranks=problem.num_ranks,
    ).start_seconds
    return float((starts + seconds).max())


def row(table: LengthTable, options: argparse.Namespace, *, budget: int, sync: Sync, shuffle: bool) -> list[str]:
    """The cells of one family."""
    found = []
    for exposed in (0.0, options.exposed):
        profile = example_profile()
        profile = replace(profile, coefficients=replace(profile.coefficients, exposed_ring_share=exposed))
        problem = Problem(num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=budget, sync=sync, profile=profile)
        found.append(measure(planned(table, problem, options.steps, shuffle=shuffle), problem, slack=options.slack))
    one = found[0]
    shares = [one.ring_tokens / one.tokens]
    shares += [tokens / max(one.ring_tokens, 1) for tokens in (one.fitting_tokens, one.kept_tokens)]
    faster = [1 - each.seconds_without / each.seconds for each in found]
    return [f"{share:.1%}" for share in shares] + [f"{share:.2%}" for share in faster]


def main() -> None:
    """Print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 8_192], help="tokens per rank")
    parser.add_argument("--steps", type=int, default=1, help="steps of each family")
    parser.add_argument("--slack", type=float, default=0.002, help="unevenness of members that is allowed")
    parser.add_argument("--exposed", type=float, default=0.2, help="share of a ring that nothing hides")
    parser.add_argument("--manifest", type=Path, help="a real manifest with a column `length`")
    options = parser.parse_args()
    tables = {family: family_table(family, sequences=SEQUENCES * options.steps, seed=0) for family in FAMILIES}
    if options.manifest:
        tables["real"] = real_table(options.manifest)
    print(f"| budget, sync, family | in rings | fit | kept | faster | faster, {options.exposed:.0%} exposed |")
    print("|---" * 6 + "|")
    for budget in options.budgets:
        for sync in SYNCS:
            for name, table in tables.items():
                cells = row(table, options, budget=budget, sync=sync, shuffle=name == "real")
                print(f"| {budget:,}, {sync}, {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
