"""Jobs and machines of all kinds, without plan files or devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fcp_cli.launching.job import Job
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.util.machine import LocalDevices

CPU = LocalDevices(device="cpu", num_devices=0, num_cores=8, memory_bytes=64 << 30)
GPUS = LocalDevices(device="cuda", num_devices=8, num_cores=64, memory_bytes=512 << 30)
NPUS = LocalDevices(device="npu", num_devices=8, num_cores=64, memory_bytes=512 << 30)
MACHINES = {"cpu": CPU, "cuda": GPUS, "npu": NPUS}


def plan_metadata(*, model: str = "qwen3-8b", sync: Sync = "iteration", **changed: Any) -> PlanMetadata:
    """Of a plan for 16 ranks on two nodes."""
    values: dict[str, Any] = {
        "fcp_version": "test",
        "num_ranks": 16,
        "ranks_per_node": 8,
        "sync": sync,
        "global_batch_size": 8,
        "tokens_per_rank": 4_000,
        "seed": 0,
        "shuffle": False,
        "solver": "test",
        "manifest": ManifestReference(name="lengths.parquet", rows=8, content_hash=""),
        "cost_profile": _profile_text(model) if model else "",
    }
    return PlanMetadata(**{**values, **changed})


@cache
def _profile_text(model: str) -> str:
    return shipped_profile(model).text


def job(stack: str = "cpu", *, metadata: PlanMetadata | None = None, **changed: Any) -> Job:
    """Two nodes of eight processes, seen from node 0."""
    values: dict[str, Any] = {
        "plan": Path("plan.parquet"),
        "metadata": metadata or plan_metadata(),
        "machine": MACHINES[stack],
        "run_dir": Path("/data/my run"),
        "num_nodes": 2,
        "processes_per_node": 8,
        "node_rank": 0,
        "master_addr": "10.0.0.1",
        "grace_seconds": 200,
    }
    return Job(**{**values, **changed})


def local_job(**changed: Any) -> Job:
    """The bundled trainer on this node's four CPU ranks."""
    values: dict[str, Any] = {
        "plan": Path("/data/plan.parquet"),
        "num_nodes": 1,
        "processes_per_node": 4,
        "arguments": ("--steps", "10"),
        "environment": {"OMP_NUM_THREADS": "1"},
        "python": "/venv/bin/python",
        "master_addr": "",
    }
    return job("cpu", **{**values, **changed})
