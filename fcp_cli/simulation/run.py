"""Simulates the steps of a plan one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fcp_cli.cost.profile import CostProfile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.pricing import profile_seconds
from fcp_cli.plan.step import FloatArray, StepPlan
from fcp_cli.simulation.engine import simulate_step
from fcp_cli.simulation.seconds import scattered_seconds
from fcp_cli.simulation.timeline import Timeline


def simulate_plan(
    steps: Iterable[StepPlan],
    metadata: PlanMetadata,
    *,
    profile: CostProfile | None = None,
    manifest: LengthTable | None = None,
    sigma: float = 0.0,
    seed: int = 0,
    cores: int | None = None,
) -> Iterator[Timeline]:
    """Run a plan step by step; holds one step at a time.

    Args:
        steps: for example `PlanReader.steps()`.
        metadata: gives the ranks, the nodes and the sync.
        profile: prices the micro-batches anew; the plan's own predictions by default.
        manifest: with `profile`, gives `eta` and vision columns.
        sigma: lognormal noise per micro-batch, see `scattered_seconds`.
        seed: of the noise.
        cores: CPU cores that all ranks share, see `engine`.

    Raises:
        PlanError: a step that its ranks cannot execute.
    """
    for step in steps:
        seconds: FloatArray = step.seconds
        if profile is not None:
            seconds = profile_seconds(
                step,
                profile=profile,
                ranks_per_node=metadata.ranks_per_node,
                padding_multiple=metadata.padding_multiple,
                manifest=manifest,
            )
        if sigma:
            seconds = scattered_seconds(step, seconds, sigma=sigma, seed=seed)
        yield simulate_step(step, num_ranks=metadata.num_ranks, sync=metadata.sync, seconds=seconds, cores=cores)
