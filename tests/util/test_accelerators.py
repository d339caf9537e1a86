"""Accelerators found by what drivers say, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.models.cluster import cluster_of, load_cluster
from fcp_cli.util.machine import Accelerators, find_accelerators, has_driver_files

_H100S = "NVIDIA H100 80GB HBM3, 81559\n" * 7 + "NVIDIA H100 80GB HBM3, 81000\n"
# Of npu-smi 23.0 on a node of Atlas 800T A2.
_NPU_TABLE = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.4        47                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3390 / 65536         |
"""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What programs print, by their names; others are not there."""
    found: dict[str, str] = {}

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=found[command[0]])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", found.get)
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_gpus_are_those_of_nvidia_smi_with_the_memory_of_the_smallest(answers: dict[str, str], tmp_path: Path) -> None:
    answers["nvidia-smi"] = _H100S
    found = find_accelerators(tmp_path)
    assert found == Accelerators(kind="cuda", name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=81_000 << 20)
    assert found.describe() == "8 x NVIDIA H100 80GB HBM3, 85 GB each"


def test_a_variable_hides_devices(answers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers["nvidia-smi"] = _H100S
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = find_accelerators(tmp_path)
    assert found is not None and found.count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_accelerators(tmp_path) is None


def test_without_nvidia_smi_the_kernel_module_names_the_gpus(answers: dict[str, str], tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 255\n")
    assert find_accelerators(tmp_path) == Accelerators(kind="cuda", name="NVIDIA A100-SXM4-80GB", count=2)


def test_npus_are_files_in_dev_named_by_npu_smi(answers: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    assert find_accelerators(tmp_path) == Accelerators(kind="npu", name="Ascend", count=2)
    answers["npu-smi"] = _NPU_TABLE
    assert find_accelerators(tmp_path) == Accelerators(kind="npu", name="Ascend 910B3", count=2)


def test_a_machine_without_any_has_none(answers: dict[str, str], tmp_path: Path) -> None:
    assert find_accelerators(tmp_path) is None


def test_they_make_one_node_of_the_shipped_cluster_that_has_such_devices() -> None:
    found = cluster_of(Accelerators(kind="cuda", name="NVIDIA H100 80GB HBM3", count=4, memory_bytes=85 * 10**9))
    shipped = load_cluster("h100-8x8")
    assert (found.nodes, found.devices_per_node, found.memory_bytes) == (1, 4, 85e9)
    assert (found.name, found.peak_flops) == (shipped.name, shipped.peak_flops)
    npus = cluster_of(Accelerators(kind="npu", name="Ascend 910B3", count=8))
    assert (npus.name, npus.memory_bytes) == ("ascend910b-8x8", 64e9)
    assert cluster_of(Accelerators(kind="cuda", name="NVIDIA L40S", count=1)).name == "example-8x8"


@pytest.mark.processes
def test_a_machine_without_accelerators_is_described_without_importing_torch() -> None:
    if has_driver_files():
        pytest.skip("this machine has an accelerator's driver, which torch is asked about")
    code = (
        "import sys; from fcp_cli.util import machine as facts; machine = facts.find_machine(); "
        "facts.collect_facts(machine=machine, asks_torch=facts.has_driver_files()); "
        "print(machine.device, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == ["cpu", "False"]


@pytest.mark.parametrize("name", ["nvidia0", "dxg", "kfd", "davinci3"])
def test_the_file_of_a_driver_has_torch_asked(tmp_path: Path, name: str) -> None:
    assert not has_driver_files(tmp_path)
    (tmp_path / name).touch()
    assert has_driver_files(tmp_path)
