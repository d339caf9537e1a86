"""Launch records for tests."""

from __future__ import annotations

from typing import Any

from fcp_cli.runs.launch_record import LaunchRecord


def launch_record(**changed: Any) -> LaunchRecord:
    """The record of a run of the bundled trainer on four ranks."""
    values: dict[str, Any] = {
        "plan": "/data/plan.parquet",
        "plan_hash": "0" * 64,
        "num_ranks": 4,
        "run_dir": "/data/run",
        "model": "qwen3-tiny",
        "manifest": None,
        "training": {},
        "program": ["-m", "fcp_cli.training.train"],
    }
    return LaunchRecord(**{**values, **changed})
