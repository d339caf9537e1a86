"""Jobs whose interpreter only notes what it was started with, so that generated files can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.job import Job
from tests.launching.cluster_jobs import cluster_job

_NOTES = """#!/usr/bin/env python3
import json, os, pathlib, sys
words = sys.argv[1:]
rank = next(word.partition("=")[2] for word in words if word.startswith("--node-rank="))
heard = {"arguments": words, "plan": os.environ["FCP_PLAN"], "directory": os.getcwd()}
pathlib.Path(__file__).with_name(f"heard-{rank}").write_text(json.dumps(heard))
sys.exit(int(os.environ.get("FAILS", "-1") == rank))
"""


def runnable(folder: Path, *, num_nodes: int = 2) -> Job:
    """A job whose nodes write `heard-K` into the folder."""
    program = folder / "python"
    program.write_text(_NOTES)
    program.chmod(0o755)
    job = replace(cluster_job(device="cpu", num_nodes=num_nodes), python=str(program), processes_per_node=1)
    return replace(job, directory=folder, values={**job.values, "setup": ()})
