"""Warm-up of a planner process: loads imports and compiled loops before its first request."""

from __future__ import annotations

import numpy as np

import fcp_cli.planning.dataset.job_plan  # noqa: F401  # serves the first request, so load it now
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver


def load_planner() -> None:
    """Plan a tiny step with a ring, to load everything that the first step of a job needs."""
    costs = Coefficients(
        attention_seconds_per_token2=1e-9,
        linear_seconds_per_token=1e-4,
        ring_bytes_per_token=1e3,
        microbatch_seconds=0.1,
    )
    profile = CostProfile(
        model="none",
        cluster="none",
        origin="assumed",
        coefficients=costs,
        bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
    )
    problem = Problem(num_ranks=2, ranks_per_node=2, tokens_per_rank=64, sync="iteration", profile=profile)
    table = LengthTable(name="none", length_tokens=np.array([96, 40, 30, 20, 10, 5], dtype=np.int64))
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table)))
    assemble(make_solver("fcp", batches).assign(batches.batch(0)), batches.batch(0), problem)
