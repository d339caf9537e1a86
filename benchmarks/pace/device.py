"""A device that sleeps for as long as a cost profile says, and the model, the kernel and the transport that go with it.

What sleeps: matrices, attention, and what a micro-batch costs whatever it holds. What is real: the plan's cursor, the
loader, rings and their hops over gloo with keys, values and their gradients, who waits for whom, the gradients' sum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fcp_cli.cost.profile import Coefficients
from fcp_cli.profiling.analytic import ATTENTION_BACKWARD
from fcp_cli.runtime import ring
from fcp_cli.runtime.kernels import AttentionKernel, lse_dtype
from fcp_cli.runtime.layout import Segments
from fcp_cli.runtime.transport import Handle, Transport

LAYERS, HEAD_DIM = 2, 8
MATRICES_BACKWARD = 2.0  # forwards
# K and V forward and again backward, and with them dK and dV, in fp32.
RING_BYTES_PER_TOKEN = LAYERS * 2 * HEAD_DIM * 4 * 3
MESSAGES_PER_HOP = 2 * LAYERS
_ARRIVED_SECONDS = 1e-3  # a wait that is over sooner had nothing to wait for


class Device:
    """Does what it is given one after the other, as an accelerator's stream does; the host sleeps until it is done.

    The host prepares what comes next while the device is busy, so preparing it costs nothing that is shorter than that.
    A sleep that ends late makes no work longer.
    """

    def __init__(self) -> None:
        self._free_at = 0.0
        self._last_seconds = 0.0

    def run(self, seconds: float) -> None:
        """Take so many seconds, from when all before is done."""
        begin = max(self._free_at, time.perf_counter() - self._last_seconds)
        self._free_at, self._last_seconds = begin + seconds, seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def hold(self) -> None:
        """Begin nothing of what follows before now: the host has only just learned what it is."""
        self._free_at, self._last_seconds = max(self._free_at, time.perf_counter()), 0.0


@dataclass(frozen=True, slots=True)
class PacedKernel:
    """Attention that takes its share of the profile's seconds, by the pairs of tokens that it was to meet."""

    device: Device
    coefficients: Coefficients
    packed = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        self._run(segments, 1.0)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=lse_dtype(q.dtype))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._run(segments, ATTENTION_BACKWARD)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _run(self, segments: Segments, forwards: float) -> None:
        # The profile's seconds are per length squared, of which the causal half are pairs.
        seconds = 2.0 * self.coefficients.attention_seconds_per_token2 * pairs_of(segments)
        self.device.run(seconds * forwards / (1.0 + ATTENTION_BACKWARD) / LAYERS)


def pairs_of(segments: Segments) -> float:
    """Return the pairs of a query and a key that it sees, half of them under a causal mask."""
    pairs = sum(q * k for q, k in zip(segments.q_lengths, segments.k_lengths, strict=True))
    return pairs / 2 if segments.causal else float(pairs)


class PacedTransport:
    """A real transport; where a message is late, the device goes on when it has come."""

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport, self._device = transport, device

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        return _PacedHop(self._transport.start(kind, send, to, receive, source), self._device)


@dataclass(frozen=True, slots=True)
class _PacedHop:
    hop: Handle
    device: Device

    def wait(self) -> None:
        began = time.perf_counter()
        self.hop.wait()
        if time.perf_counter() - began > _ARRIVED_SECONDS:
            self.device.hold()


class PacedModel(nn.Module):
    """Layers of slept matrices and attention over a real ring, with one key/value head of few numbers."""

    def __init__(self, device: Device, coefficients: Coefficients) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HEAD_DIM))
        self._device, self._coefficients = device, coefficients

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [1, tokens, HEAD_DIM] for input_ids [1, tokens]."""
        current = ring.current_ring.get()
        assert current is not None
        if current.layout.lengths:  # an idle rank's padding costs nothing
            self._device.run(self._coefficients.microbatch_seconds)
        matrices = self._coefficients.linear_seconds_per_token * current.tokens / (1.0 + MATRICES_BACKWARD) / LAYERS
        hidden = self.weight.expand(1, input_ids.shape[1], HEAD_DIM)
        for _ in range(LAYERS):
            hidden = _Matrices.apply(hidden, self._device, matrices)  # type: ignore[no-untyped-call]
            heads = hidden.unsqueeze(1)
            hidden = ring.attention(heads, heads, heads).squeeze(1)
        return hidden


class _Matrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, device: Device, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        device.run(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        ctx.device.run(MATRICES_BACKWARD * ctx.seconds)
        return grads[0], None, None


@contextmanager
def attention_on(device: Device, coefficients: Coefficients) -> Iterator[None]:
    """Let rings of this process compute on a paced device."""
    kernel: AttentionKernel = PacedKernel(device, coefficients)
    with mock.patch.object(ring, "select_kernel", lambda device_type, dtype: kernel):
        yield
