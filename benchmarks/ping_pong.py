"""What attention on any rank owes to the messages that it hides: `distca` with its ping-pong, and without.

    python -m benchmarks.ping_pong --manifests wlb_llm_lengths.parquet linux_source.parquet

One step of 512 sequences of each set of `real_lengths`, Qwen3-8B on 64 ranks. With its ping-pong all computation of a
micro-batch hides messages, without it attention alone. The column "free rings" is fcp where messages take no time: no
ping-pong of rings could gain more.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.real_lengths import PUBLISHED, drawn
from benchmarks.split_heads import profile_of
from benchmarks.workloads import FAMILIES
from fcp_cli.cost.profile import CostProfile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.strategies import distca


def without_messages(profile: CostProfile) -> CostProfile:
    """Return a profile whose rings take no time; kernels keep what chunks cost them."""
    free = dict.fromkeys(("ring_bytes_per_token", "last_hop_bytes_per_token"), 0.0)
    free |= dict.fromkeys(("ring_hop_seconds", "last_hop_seconds"), 0.0)
    return replace(profile, coefficients=replace(profile.coefficients, **free))


def fcp_seconds(problem: Problem, table: LengthTable) -> float:
    """Return the seconds of fcp's plan of one step."""
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))
    batch = batches.batch(0)
    return makespan_seconds(make_solver("fcp", batches).assign(batch), batch, problem)


def main() -> None:
    """Print one row per set of lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifests", type=Path, nargs="*", default=[], help="Parquet files with a column length")
    parser.add_argument("--cluster", default="h100-8x8")
    parser.add_argument("--budget", type=int, default=8192, help="tokens per rank")
    options = parser.parse_args()
    manifests = {path.stem: path for path in options.manifests}
    profile = profile_of("qwen3-8b", options.cluster)
    problem = Problem(
        num_ranks=64, ranks_per_node=8, tokens_per_rank=options.budget, sync="microbatch", profile=profile
    )
    free = replace(problem, profile=without_messages(profile))
    print("| lengths | fcp | distca | without ping-pong | free rings |\n|---|---:|---:|---:|---:|")
    for name in [*FAMILIES, *manifests, *PUBLISHED]:
        table = LengthTable(name=name, length_tokens=drawn(name, sequences=512, manifests=manifests))
        batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))
        batch, plan = batches.batch(0), fcp_seconds(problem, table)
        priced = [distca.make_solver(batches, ping_pong=one).seconds(batch) for one in (True, False)]
        priced.append(fcp_seconds(free, table))
        print(f"| {name} | {plan:.2f} s | " + " | ".join(f"{one:.2f} s, {one / plan:.2f}x" for one in priced) + " |")


if __name__ == "__main__":
    main()
