"""Run folders: what a job leaves there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.checkpoints import CheckpointHeader
from tests.fuzz import mutations
from tests.fuzz.kind import Change, Kind, of_files
from tests.fuzz.planning_kinds import of_plan
from tests.report.runs import write_run
from tests.runs.records import write_launch

RUN = "runs/tiny-001"
_CHECKPOINT = f"{RUN}/checkpoints/step-000001/checkpoint.json"


def write_runs(folder: Path) -> None:
    """Write the folder of a run that finished; `plan.parquet` is there."""
    run = folder / RUN
    (folder / _CHECKPOINT).parent.mkdir(parents=True)
    plan = folder / "plan.parquet"
    (run / "plan.parquet").write_bytes(plan.read_bytes())
    write_run(run / "metrics.jsonl", plan)
    plan_hash = PlanReader(plan).metadata.plan_hash
    write_launch(run, plan="plan.parquet", plan_hash=plan_hash, run_dir=RUN)
    (run / "logs" / "20260101").mkdir(parents=True)
    (run / "logs" / "20260101" / "launcher.log").write_text("step 1\nstep 2\n")
    owner: dict[str, Any] = {
        "format": "fcp-owner/1",
        "host": "here",
        "pid": 2**22 - 3,
        "process": None,
        "ended": "finished",
    }
    owner |= {"since": "2026-01-01T00:00:00+00:00", "job": "", "mark": "7-7"}
    (run / "owner.json").write_text(json.dumps(owner))
    facts: dict[str, Any] = {"step": 1, "plan_hash": plan_hash, "num_ranks": 4, "sharding": "replicated"}
    header = CheckpointHeader(**facts, model="qwen3-tiny", torch="2.13")
    (folder / _CHECKPOINT).write_text(header.text())


_SEEN = (f"watch {RUN} --json", f"watch {RUN} --once", f"report {RUN} -o out.html")
_RESUMED = (
    f"launch --resume --run-dir {RUN} --dry-run --json",
    f"plan dataset.parquet --continue-from {RUN} --ranks 6 -o out.parquet",
)
_WHOLE: dict[str, Change] = {
    f"{RUN}/launch.json": mutations.of_json,
    f"{RUN}/owner.json": mutations.of_json,
    f"{RUN}/metrics.jsonl": mutations.of_lines,
    f"{RUN}/plan.parquet": of_plan,
    _CHECKPOINT: mutations.of_json,
    f"{RUN}/logs/20260101/launcher.log": mutations.of_bytes,
}
KINDS: dict[str, Kind] = {
    "metrics": of_files(
        f"{RUN}/metrics.jsonl",
        *_SEEN,
        "profile fit FILE --plan plan.parquet --skip-steps 0 -o out.yaml",
        "profile fit FILE --skip-steps 0 -o out.yaml",
        "report plan.parquet --metrics FILE -o out.html --json",
        change=mutations.of_lines,
    ),
    "launch record": of_files(f"{RUN}/launch.json", *_SEEN, *_RESUMED, change=mutations.of_json),
    "owner": of_files(f"{RUN}/owner.json", *_SEEN, change=mutations.of_json),
    "checkpoint header": of_files(_CHECKPOINT, *_RESUMED, change=mutations.of_json),
    "run folder": of_files(_WHOLE, *_SEEN, *_RESUMED),
}
