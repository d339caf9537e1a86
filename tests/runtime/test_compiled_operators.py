"""What Triton compiles in `start` is what rings call later: no operator is compiled while other ranks wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.models.model import load_model
from fcp_cli.runtime import kernel_agreement, rows
from fcp_cli.runtime.kernel_agreement import compile_ring_operators
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel, FlashOperators
from tests.runtime.emulation import run_recorded, use_kernel
from tests.runtime.fake_cuda import FakeFlash
from tests.runtime.reference import make_example

pytestmark = pytest.mark.torch

PROFILES = Path(__file__).parents[2] / "profiles" / "cost"
Variant = tuple[Any, ...]


def specialized(tensor: Tensor | None) -> Variant | None:
    """What Triton compiles an operator anew for: a tensor's type, and whether its address is a multiple of 16 bytes."""
    return tensor if tensor is None else (tensor.dtype, tensor.storage_offset() * tensor.element_size() % 16 == 0)


class Operators:
    """The operators in torch, which note the variants that they are called as."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()

    def merge_rows(
        self, source: Tensor, into: Tensor, also: Tensor | None, lse: Tensor, positions: Tensor | None, part: Tensor,
        part_lse: Tensor,
    ) -> None:  # fmt: skip
        tensors = (source, into, also, part, positions)
        self.variants.add(("merge", *map(specialized, tensors), part.shape[1:], lse.dtype, part_lse.dtype))
        at = slice(len(part)) if positions is None else positions
        weight = torch.sigmoid(part_lse - lse[at]).unsqueeze(-1)
        merged = torch.lerp(source[at].float(), part.float(), weight)
        lse[at] = torch.logaddexp(lse[at], part_lse)
        for target in (into, also):
            if target is not None:
                target[at] = merged.to(target.dtype)

    def add_rows(self, source: Tensor, into: Tensor, positions: Tensor | None, share: Tensor) -> None:
        tensors = (source, into, share, positions)
        self.variants.add(("add", *map(specialized, tensors), share[0].numel()))
        at = slice(len(share)) if positions is None else positions
        into[at] = (source[at].float() + share.float()).to(into.dtype)

    def add_pair_rows(self, total: Tensor, positions: Tensor | None, first: Tensor, second: Tensor) -> None:
        tensors = (total, positions, first, second)
        self.variants.add(("pair", *map(specialized, tensors), first[0].numel(), total.stride(0) % 16))
        at = slice(len(first)) if positions is None else positions
        for half, share in zip(total, (first, second), strict=True):
            half[at] = (half[at].float() + share.float()).to(half.dtype)

    def take_rows(
        self, first: Tensor, second: Tensor, third: Tensor, lse: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tensors = (first, second, third)
        strides = [stride % 16 for tensor in tensors for stride in tensor.stride()]
        self.variants.add(("take", *map(specialized, (*tensors, positions)), first.shape[1:], lse.dtype, *strides))
        return first[positions], second[positions], third[positions], lse[positions]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """Operators of a device with Triton, on the CPU, and FlashAttention 2."""
    found, flash = Operators(), FakeFlash()
    for name in ("merge_rows", "add_rows", "add_pair_rows", "take_rows"):
        monkeypatch.setattr(rows, name, getattr(found, name))
    monkeypatch.setattr(rows, "fused_rows", lambda device_type: True)
    monkeypatch.setattr(kernel_agreement, "fused_rows", lambda device_type: True)
    use_kernel(monkeypatch, CudaFlashKernel("fa2", FlashOperators(flash.forward, flash.backward)))
    yield found


@pytest.mark.parametrize("degree", [2, 3, 5])
@pytest.mark.parametrize(("model", "window"), [("qwen3-8b", None), ("gemma3-27b", None), ("gemma3-27b", 9)])
def test_rings_call_only_operators_that_were_compiled_at_the_start(
    model: str, window: int | None, degree: int, operators: Operators
) -> None:
    profile = (PROFILES / f"{model}-example-8x8.yaml").read_text(encoding="utf-8")
    metadata: Any = SimpleNamespace(cost_profile=profile, tensor_parallel=2)
    compile_ring_operators(metadata, torch.device("cpu"), "fp32")
    compiled, operators.variants = operators.variants, set()
    spec = load_model(model)
    heads = (spec.num_heads // 2, spec.num_kv_heads // 2)
    for lengths in ((64,), (61,), (5, 7, 13, 37, 101), (100, 1, 4), (3, 3, 3, 3, 3, 3)):
        example = make_example(lengths, heads, spec.head_dim, dtype=torch.float32, window=window)
        run_recorded(example, tuple(range(degree)), torch.bfloat16)
    assert operators.variants and operators.variants <= compiled
