"""Start of a run's metrics in any framework: its folder, file and first line."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runs.metrics.metrics import FORMAT, drop_steps_from
from fcp_cli.runs.ownership import own_unless_launched

METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"
_MODEL_VARIABLE = "FCP_MODEL"


def begin_metrics(path: Path, first_step: int) -> None:
    """Begin or resume the metrics of a run: own its folder, and drop the records of steps that will run again.

    Rank 0 calls it, also in a job that fcp prepared but another launcher started.
    """
    _own_folder_of(path)
    drop_steps_from(path, first_step)


def _own_folder_of(metrics: Path) -> None:
    """Own the folder of a metrics file until this process ends, if it is the job's run folder."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if not run_dir or metrics.absolute().parent != Path(run_dir).absolute():
        return
    owned = own_unless_launched(Path(run_dir))
    if owned is not None:
        atexit.register(owned.release)


def run_record(plan: Path, metadata: PlanMetadata, *, first_step: int, device: str, **facts: str) -> dict[str, Any]:
    """Return the `run` record at the start of a loop.

    Args:
        plan, metadata: plan file and its metadata.
        first_step: optimizer step.
        device: device type.
        facts: device name and framework version.
    """
    return {
        "format": FORMAT,
        "kind": "run",
        "plan_hash": metadata.plan_hash,
        "plan": str(plan),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "sync": metadata.sync,
        # Not the cost profile's model, which may be a placeholder: the script's model is only known if given.
        "model": os.environ.get(_MODEL_VARIABLE),
        "device": device,
        **facts,
        "started": datetime.now(timezone.utc).isoformat(),
        "first_step": first_step,
        "steps": metadata.end_step,
        "program": sys.argv[0],
    }
