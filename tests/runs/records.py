"""Launch records and metrics for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from fcp_cli.runs import metrics_reader
from fcp_cli.runs.run_dir import LAUNCH_FORMAT, Launched, RunPaths, read_launch
from fcp_cli.util.files import write_json_atomically


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run, of whatever kind."""
    return cast(list[dict[str, Any]], metrics_reader.read_metrics(path))


def write_steps(metrics: Path, steps: int) -> None:
    """The metrics of a run that has finished so many steps."""
    step = {"kind": "step", "tokens": 1, "loss": 1.0, "seconds": 1.0, "predicted_seconds": 1.0, "idle_fraction": 0.0}
    metrics.write_text("".join(json.dumps({**step, "step": index, "ranks": []}) + "\n" for index in range(steps)))


def write_launch(folder: Path, /, **changed: Any) -> Launched:
    """The job of a run of the bundled trainer on four ranks, written and read."""
    values: dict[str, Any] = {
        "format": LAUNCH_FORMAT,
        "plan": "/data/plan.parquet",
        "plan_hash": "0" * 64,
        "num_ranks": 4,
        "run_dir": "/data/run",
        "model": "qwen3-tiny",
        "manifest": None,
        "training": {},
        "program": ["-m", "fcp_cli.training.train"],
    }
    write_json_atomically(RunPaths(run_dir=folder).launch, {**values, **changed})
    return read_launch(folder)
