"""The line with which a run's metrics begin, whatever framework trains."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fcp_cli.errors import ProfileError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.metrics import FORMAT

METRICS_VARIABLE = "FCP_METRICS"
_MODEL_VARIABLE = "FCP_MODEL"


def run_record(plan: Path, metadata: PlanMetadata, *, first_step: int, device: str, **facts: str) -> dict[str, Any]:
    """Return the `run` record of a loop that begins.

    Args:
        device: its kind.
        facts: the device's name, the framework's version.
    """
    return {
        "format": FORMAT,
        "kind": "run",
        "plan_hash": metadata.plan_hash,
        "plan": str(plan),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "sync": metadata.sync,
        "model": os.environ.get(_MODEL_VARIABLE) or _planned_model(metadata),
        "device": device,
        **facts,
        "started": datetime.now(timezone.utc).isoformat(),
        "first_step": first_step,
        "steps": metadata.end_step,
        "program": sys.argv[0],
    }


def _planned_model(metadata: PlanMetadata) -> str | None:
    """Return the model of the plan's cost profile: a script's own is known to the script alone."""
    from fcp_cli.cost.profile import parse_cost_profile  # ranks need nothing else of the cost model

    with suppress(ProfileError):
        return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").model
    return None
