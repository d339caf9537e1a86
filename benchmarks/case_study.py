"""Which groups a batch gets, and what that gains over one degree for all: `python -m benchmarks.case_study`.

As Table 6 of the FCP paper, on 32 ranks: <d> x m stands for m groups of degree d in one wave, that is in one of the
paper's micro-batches. The paper's cases are batches of OpenVid and MSRVTT on Qwen3-VL; ours are the benchmark's
families under the example profile, in predicted time. "extreme" is its batch with one sequence of 128k tokens among
short ones, for which it reports 2.24x.
"""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.workloads import FAMILIES, example_profile, family_table
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver

PAPER = (
    ("case 1 (OpenVid)", "<8>x1 <6>x2 <4>x1 <2>x2 <1>x4", "<8>x4", 1.27),
    ("case 2 (MSRVTT)", "<4>x2 <3>x4 <2>x6", "<4>x8", 1.19),
)


def plan(solver: str, family: str, sync: Sync, *, ranks: int, sequences: int) -> StepPlan:
    """One step of a family, seed 0."""
    problem = Problem(num_ranks=ranks, ranks_per_node=8, tokens_per_rank=16_384, sync=sync, profile=example_profile())
    table = family_table(family, sequences=sequences, seed=0)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=sequences, shuffle=False))
    return plan_step(batches.batch(0), problem, make_solver(solver, batches))


def groups(step: StepPlan, wave: int | None = None) -> str:
    """<degree>x count of the groups that work, of one wave or of the whole step."""
    counts: Counter[int] = Counter()
    for row in step.microbatches():
        if not row.is_idle and wave in (None, row.wave):
            counts[row.degree] += 1
    return " ".join(f"<{degree}>x{counts[degree]}" for degree in sorted(counts, reverse=True))


def waves(step: StepPlan) -> str:
    """The groups of every wave."""
    return "; ".join(groups(step, wave) for wave in range(int(step.wave.max()) + 1))


def main() -> None:
    """Print the paper's cases and ours as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=512)
    options = parser.parse_args()
    print("| batch | strategy, sync | groups, wave by wave | step, s | against static |")
    print("|---|---|---|---|---|")
    for name, paper, static, speedup in PAPER:
        print(f"| {name} | FCP as published | {paper} | - | {speedup:.2f}x over {static} |")
    for family in FAMILIES:
        shape = {"ranks": options.ranks, "sequences": options.sequences}
        for sync in ("microbatch", "iteration"):
            static_step = plan("static", family, sync, **shape)
            for solver in ("static", "fcp-paper", "fcp"):
                step = plan(solver, family, sync, **shape)
                shown = waves(step) if sync == "microbatch" else f"(no waves) {groups(step)}"
                gain = f"{static_step.makespan_seconds / step.makespan_seconds:.2f}x"
                print(f"| {family} | {solver}, {sync} | {shown} | {step.makespan_seconds:.2f} | {gain} |", flush=True)


if __name__ == "__main__":
    main()
