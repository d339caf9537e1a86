"""One attention call by two kernels: long sequences of a pack by one, runs of the others between them by another.

cuDNN is the quickest on long sequences of a Hopper, and its packed form is not used up to torch 2.13, so that a pack of
unequal lengths ran on FlashAttention 2 whole. Sequences do not attend to each other: results are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fcp_cli.kernel_names import KernelName
from fcp_cli.runtime.kernels.available import NamedKernel
from fcp_cli.runtime.layouts.layout import Segments


class Run(NamedTuple):
    """Neighbouring sequences of a call, and their kernel."""

    kernel: NamedKernel
    segments: Segments


def runs_of(segments: Segments, kernels: Sequence[NamedKernel]) -> list[Run]:
    """Return the runs of a call.

    Args:
        segments: the call; without a window.
        kernels: of each sequence.
    """
    runs, start = [], 0
    for kernel, group in groupby(kernels):
        stop = start + len(list(group))
        lengths = segments.q_lengths[start:stop], segments.k_lengths[start:stop]
        runs.append(Run(kernel, Segments(*lengths, causal=segments.causal)))
        start = stop
    return runs


class SplitKernel:
    """The kernels of a call's runs as one kernel, for this call alone. No device synchronisation.

    Args:
        name: of the kernel of the long sequences, which is dropped if a run fails.
        runs: of the call.
    """

    packed = True

    def __init__(self, name: KernelName, runs: list[Run]) -> None:
        self.name = name
        self._runs = runs

    def refusal(self, segments: Segments) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        parts = zip(self._runs, self._cut((q,), (k, v)), strict=True)
        results = [
            run.kernel.forward(queries, keys, values, run.segments, scale) for run, (queries, keys, values) in parts
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(self._runs, self._cut((dout, q, out, lse), (k, v)), strict=True)
        results = [
            run.kernel.backward(douts, queries, keys, values, outs, lses, run.segments, scale)
            for run, (douts, queries, outs, lses, keys, values) in parts
        ]
        dq, dk, dv = (torch.cat(grads) for grads in zip(*results, strict=True))
        return dq, dk, dv

    def _cut(self, of_rows: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Yield, per run, views of packed tensors: those of rows, then those of keys."""
        rows = [sum(run.segments.q_lengths) for run in self._runs]
        keys = [sum(run.segments.k_lengths) for run in self._runs]
        sides = ((of_rows, rows), (of_keys, keys))
        return zip(*(torch.split_with_sizes(one, sizes) for tensors, sizes in sides for one in tensors), strict=True)
