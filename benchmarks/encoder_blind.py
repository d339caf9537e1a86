"""What does a plan gain from knowing the vision encoder's work? Predicted, nothing is run.

    python -m benchmarks.encoder_blind --model qwen3-vl-8b

For each made-up data set the planner plans the same steps twice: with the encoder's work in the manifest, and with
tokens alone. Both plans are then priced under the whole cost, encoder included, on the example cluster.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.clips import NAMES
from benchmarks.workloads import media_manifest
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.compare import SYNCS
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--cluster", default="example-8x8")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=512, help="of a step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens-per-rank", type=int, default=16_384)
    arguments = parser.parse_args()
    settings = BatchSettings(
        global_batch_size=arguments.sequences, step_limit=arguments.steps, shuffle=False, overlong="drop"
    )
    print(
        "| data set | encoder | sync | encoder's share of work | tokens alone | gap | with the encoder | gap | gain |"
    )
    print("|---" * 9 + "|")
    for name in NAMES:
        table = read_manifest(media_manifest(name, "qwen3-vl", arguments.sequences * arguments.steps))
        for frozen in (False, True):
            for sync in SYNCS:
                problem = Problem(
                    num_ranks=arguments.ranks,
                    ranks_per_node=8,
                    tokens_per_rank=arguments.tokens_per_rank,
                    sync=sync,
                    profile=analytic_profile(
                        load_model(arguments.model),
                        load_cluster(arguments.cluster),
                        recipe=Recipe(
                            zero_stage=3 if sync == "microbatch" else 1, recompute="full", freeze_vision=frozen
                        ),
                        sync=sync,
                        ranks=arguments.ranks,
                    ),
                )
                print(row(name, table, problem, settings, frozen=frozen, sync=sync), flush=True)


def row(name: str, table: LengthTable, problem: Problem, settings: BatchSettings, *, frozen: bool, sync: Sync) -> str:
    blind = replace(table, vision_patches=None, vision_patch_pairs=None)
    whole, tokens = (sum(GlobalBatches(seen, problem, settings).batch(0).work.total_seconds) for seen in (table, blind))
    (unaware, unaware_gap), (aware, aware_gap) = (
        step_seconds(seen, table, problem, settings) for seen in (blind, table)
    )
    return (
        f"| {name} | {'frozen' if frozen else 'trained'} | {sync} | {1 - tokens / whole:.0%} | {unaware:.2f} s "
        f"| {unaware_gap:.1%} | {aware:.2f} s | {aware_gap:.1%} | {unaware / aware:.2f}x |"
    )


def step_seconds(
    seen: LengthTable, priced: LengthTable, problem: Problem, settings: BatchSettings
) -> tuple[float, float]:
    """(mean step time, gap to the bound) of plans made from `seen`, priced with the work of `priced`."""
    batches, real = (GlobalBatches(table, problem, settings) for table in (seen, priced))
    solver = make_solver("fcp", batches)
    steps = [assemble(solver.assign(batch), real.batch(batch.step), problem) for batch in batches]
    total, bound = (sum(getattr(step, name) for step in steps) for name in ("makespan_seconds", "bound_seconds"))
    return total / len(steps), total / bound - 1


if __name__ == "__main__":
    main()
