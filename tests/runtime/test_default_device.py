"""A script's default device, as of `torch.set_default_device("cuda")`, takes none of the runtime's host tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils import _device

import fcp_cli
from fcp_cli.runtime.kernels import select
from fcp_cli.runtime.kernels.base import AttentionKernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel, FlashOperators
from fcp_cli.runtime.kernels.cudnn import CudnnKernel, CudnnOperators
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.kernels.select import Signature
from tests.runtime.emulation import GatheringCpuKernel, require_exact, use_kernel
from tests.runtime.fake_cuda import FakeCudnn, FakeFlash
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import make_example

pytestmark = pytest.mark.torch

FLASH, CUDNN = FakeFlash(), FakeCudnn()
KERNELS: dict[str, AttentionKernel] = {
    "cpu": CpuKernel(),
    "gathered": GatheringCpuKernel(),
    "fa2": CudaFlashKernel("fa2", FlashOperators(FLASH.forward, FLASH.backward)),
    "npu": NpuKernel(FakeNpu(head_major=True)),
}


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("name", KERNELS)
def test_rings_compute_the_same_under_another_default_device(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel(monkeypatch, KERNELS[name])
    lengths = (41, *(2 + at % 3 for at in range(70)), 23)  # no other test has cached their indices
    example = make_example(lengths, (4, 2), 64, dtype=torch.float32, window=window)
    with torch.device("meta"):
        require_exact(example, 3, dtype=torch.float32)


def test_kernels_pass_their_test_calls_under_another_default_device() -> None:
    dense = CudnnOperators(CUDNN.dense_forward, CUDNN.dense_backward, None, None)
    with torch.device("meta"):
        assert select.failure(CudnnKernel(dense), Signature(4, 2, 64, 64, torch.float32), torch.device("cpu")) is None


@pytest.mark.parametrize("room", ["runtime", "integrations"])
def test_every_tensor_that_is_made_in_a_job_names_its_device(room: str) -> None:
    """Also where no ring leads; PyTorch says which of its functions follow the default device."""
    following = {function.__name__ for function in _device._device_constructors()}
    if room == "integrations":
        following.remove("as_tensor")  # of what frameworks hand over, which stays where it is
    nameless = [
        f"{path.name}:{call.lineno}"
        for path in (Path(fcp_cli.__file__).parent / room).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in following
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert not nameless
