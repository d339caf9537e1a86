"""`fcp selftest` on ranks of this machine, and what it prints for several nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcp_cli.profiling.samples import read_measurement
from tests.cli.test_profile_cli import Fcp, fcp

__all__ = ["fcp"]
pytestmark = [pytest.mark.hf, pytest.mark.torch]


@pytest.mark.processes
@pytest.mark.distributed
def test_two_ranks_of_a_cpu_pass_and_leave_one_block_and_one_document(
    tmp_path: Path, fcp: Fcp, forked_jobs: None
) -> None:
    done = fcp("selftest", "--quick", "--ranks", "2", "--device", "cpu", "--limit", "300", "--json")
    document = json.loads(done.out)
    assert document == json.loads((tmp_path / "selftest.json").read_text())
    checks = {check["name"]: check for check in document["checks"]}
    assert list(checks) == ["machine", "links", "kernel", "rings", "overlap", "order", "packs"]
    assert document["passed"] and all(checks[name]["passed"] for name in ("kernel", "rings", "order"))
    assert checks["machine"]["figures"]["kernel"] == "CpuKernel"
    assert checks["machine"]["figures"]["variables"]["OMP_NUM_THREADS"] == "1"
    assert set(checks["links"]["figures"]["gigabytes_per_second_by_size"]["intra_node"]) == {"65536", "1048576"}
    assert checks["rings"]["figures"]["multiple_of_own_error"]["degree 2, ranks 0-1"] <= 2
    assert set(checks["overlap"]["figures"]["longer_percent"]["2"]) == {"forward", "backward"}
    assert len(checks["order"]["figures"]["losses"]) == 4
    packs = checks["packs"]["figures"]
    assert len(packs["packs"]) == 5 and all(point["held_out"] for point in packs["packs"])
    assert packs["memory_error_percent"] is not None


def test_several_nodes_get_a_command_to_run_on_each(tmp_path: Path, fcp: Fcp) -> None:
    done = fcp("selftest", "--nodes", "2", "--devices-per-node", "8", "--device", "cuda")
    assert "--nproc-per-node=8 --nnodes=2" in done.out
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in done.out
    assert done.out.rstrip().endswith(f"-m fcp_cli.verification.worker {tmp_path}/selftest/settings.json")
    measurement = read_measurement(tmp_path / "selftest" / "measurement.json")
    assert (measurement.ranks, measurement.nodes, measurement.model) == (16, 2, "qwen3-8b")
