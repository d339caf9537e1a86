"""Reference attention in fp64, and the error of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 2e-6}
"""Maximum relative L2 error of a single device."""


class Attended(NamedTuple):
    """Result of an attention call: output [1, H, T, D] and gradients of the three inputs."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An attention call: heads, head size, and sequence lengths of its pack."""

    heads: int
    kv_heads: int
    head_size: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def describe(self) -> str:
        pack = f"{len(self.lengths)} sequences" if len(self.lengths) > 1 else f"length {self.tokens}"
        return f"{self.heads}/{self.kv_heads} heads of {self.head_size}, {pack}"


class Drawn(NamedTuple):
    """Inputs and output gradient [1, heads, T, D]; equal on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def rows(self, index: Tensor) -> Drawn:
        return Drawn(*(tensor.index_select(2, index) for tensor in self))


def draw(case: Case, dtype: torch.dtype, device: torch.device) -> Drawn:
    """Draw a case's inputs at random, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(case.tokens)
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(1, heads, case.tokens, case.head_size) for heads in sizes]
    return Drawn(*(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes))


def exact(case: Case, drawn: Drawn) -> Attended:
    """Compute a case in fp64, sequence by sequence; the result is on the CPU."""
    q, k, v, dout = (_in_fp64(tensor) for tensor in drawn)
    sequences = zip(*(torch.split(tensor, list(case.lengths), dim=2) for tensor in (q, k, v, dout)), strict=True)
    pieces = [_one_sequence(*parts) for parts in sequences]
    return Attended(*(torch.cat(parts, dim=2).cpu() for parts in zip(*pieces, strict=True)))


def _in_fp64(tensor: Tensor) -> Tensor:
    # Ascend devices have no fp64.
    return (tensor.cpu() if tensor.device.type == "npu" else tensor).to(torch.float64)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Attended:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    shared = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in leaves[1:])
    scores = leaves[0] @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.softmax(scores.masked_fill(future, float("-inf")), dim=3) @ values
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, dout))


def squares(found: Attended, wanted: Attended) -> list[float]:
    """Return sum((found - wanted)^2) and sum(wanted^2) over all tensors; these sums add up over ranks."""
    pairs = [(a.cpu().to(torch.float64), b) for a, b in zip(found, wanted, strict=True)]
    differences = sum(float((a - b).square().sum()) for a, b in pairs)
    return [differences, sum(float(tensor.square().sum()) for tensor in wanted)]


def relative(sums: list[list[float]]) -> float:
    """Return the relative L2 error from the sums of several ranks."""
    differences, sizes = (sum(row[column] for row in sums) for column in (0, 1))
    return float((differences / sizes) ** 0.5) if sizes else 0.0
