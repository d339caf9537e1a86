"""Every strategy on the benchmark families: `python -m benchmarks.compare_families`.

Per budget and sync: mean step time over the seeds with the mean gap to the bound, per family, and the geometric mean of
how much longer the strategy's steps take than fcp's. Predicted by the cost model; the last column is planning time. The
example profile is completed by the bytes of split heads, of which its bytes of a ring are the keys' and values' part.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np

from benchmarks.workloads import FAMILIES, MAX_LENGTH, example_profile, family_table
from fcp_cli.cost.profile import CostProfile, Heads
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.compare import SYNCS, Outcome, compare
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import compared_names

Outcomes = dict[tuple[str, Sync], dict[str, list[Outcome]]]  # by strategy and sync, then by family


def profile_with_heads() -> CostProfile:
    """The example profile, with the 32 query heads and 8 key/value heads of Qwen3-8B."""
    profile = example_profile()
    ring_bytes = profile.coefficients.ring_bytes_per_token
    heads = Heads(
        query_heads=32,
        key_value_heads=8,
        exchange_bytes_per_token=4 * ring_bytes,
        key_value_exchange_bytes_per_token=ring_bytes,
        exchange_seconds=0.0,
    )
    return replace(profile, heads=heads)


def run(
    budget: int, *, names: list[str], ranks: int, sequences: int, seeds: int, longest: int, milp_seconds: float
) -> Outcomes:
    """One step of every family and seed."""
    found: Outcomes = defaultdict(lambda: defaultdict(list))
    problem = Problem(
        num_ranks=ranks, ranks_per_node=8, tokens_per_rank=budget, sync="iteration", profile=profile_with_heads()
    )
    settings = BatchSettings(global_batch_size=sequences, shuffle=False)
    for family in FAMILIES:
        for seed in range(seeds):
            table = family_table(family, sequences=sequences, seed=seed)
            table = replace(table, length_tokens=np.minimum(table.length_tokens, longest))
            for one in compare(table, problem, settings, names=names, milp_seconds=milp_seconds):
                for sync, outcome in one.outcomes.items():
                    found[one.name, sync][family].append(outcome)
    return found


def show(found: Outcomes, names: list[str], sync: Sync) -> None:
    """One Markdown table; strategies in ascending order of their ratio to fcp."""
    ratios = {name: _ratio(found[name, sync], found["fcp", sync]) for name in names}
    print("| strategy | " + " | ".join(FAMILIES) + " | over fcp | over budget | ms |")
    print("|---" * (len(FAMILIES) + 4) + "|")
    for name in sorted(names, key=ratios.__getitem__):
        outcomes = found[name, sync]
        every = [outcome for family in FAMILIES for outcome in outcomes[family]]
        over_budget = sum(outcome.over_budget for outcome in every)
        milliseconds = 1e3 * statistics.median(outcome.planning_seconds for outcome in every)
        cells = " | ".join(_cell(outcomes[family]) for family in FAMILIES)
        print(f"| {name} | {cells} | {ratios[name]:.2f}x | {over_budget} | {milliseconds:.3g} |", flush=True)


def _cell(outcomes: list[Outcome]) -> str:
    seconds = statistics.fmean(outcome.step_seconds for outcome in outcomes)
    return f"{seconds:.2f} s, {statistics.fmean(outcome.gap for outcome in outcomes):.1%}"


def _ratio(ours: dict[str, list[Outcome]], fcp: dict[str, list[Outcome]]) -> float:
    pairs = [pair for family in FAMILIES for pair in zip(ours[family], fcp[family], strict=True)]
    return statistics.geometric_mean(one.step_seconds / other.step_seconds for one, other in pairs)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 8_192], help="tokens per rank")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=512, help="sequences of the step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=MAX_LENGTH, help="cut longer sequences, as fine-tuning does")
    parser.add_argument("--milp-seconds", type=float, default=1.0, help="time limit of flexsp's programs")
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument("--without", nargs="*", default=[], help="strategies to leave out")
    chosen_by.add_argument("--only", nargs="*", default=compared_names(), help="strategies to compare with fcp")
    options = parser.parse_args()
    chosen = {"fcp", *options.only} - {*options.without}
    names = [name for name in compared_names() if name in chosen]
    for budget in options.budgets:
        found = run(
            budget,
            names=names,
            ranks=options.ranks,
            sequences=options.sequences,
            seeds=options.seeds,
            longest=options.longest,
            milp_seconds=options.milp_seconds,
        )
        for sync in SYNCS:
            print(f"\n{options.ranks} ranks, {budget} tokens per rank, sync {sync}\n")
            show(found, names, sync)


if __name__ == "__main__":
    main()
