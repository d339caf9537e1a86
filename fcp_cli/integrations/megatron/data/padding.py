"""Padding added by rings of equal chunks, and whether the plan accounts for it."""

from __future__ import annotations

from pathlib import Path

from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.pricing.padding import held_tokens, padding_multiple


def padding_report(plan: Path, metadata: PlanMetadata, *, tensor_parallel: int) -> str:
    """Return the share of padding in a plan, for the start-up log line; reads the whole plan.

    Args:
        plan: plan file.
        metadata: metadata of the plan.
        tensor_parallel: devices over which sequence parallelism divides a rank's tokens; 1 without it.
    """
    needed = padding_multiple(tensor_parallel)
    tokens = held = 0
    for step in PlanReader(plan).steps():
        tokens += int(step.tokens.sum())
        held += int(held_tokens(step, needed).sum())
    share = f"{held / max(tokens, 1) - 1:.1%} padding"
    if metadata.padding_multiple is not None and metadata.padding_multiple % needed == 0:
        return f"{share}, which the plan counts"
    devices = f" --tensor-parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    return f"{share}, which the plan does not count ('fcp plan --padded-rings{devices}' does)"
