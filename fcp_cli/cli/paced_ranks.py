"""Paced ranks: a simulated device and links, with a matching model, kernel and transport, on the real runtime.

    python -m fcp_cli.cli.paced_ranks NUM_RANKS PLAN [PLAN ...]

Sleeps replace matrices, attention and the fixed cost of a micro-batch, and delay messages that gloo delivers faster
than the profile's links. Everything else is real: plan cursor, loader, rings with their gloo hops of keys, values and
gradients (of a small head), waits between ranks, and gradient reduction.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # before the fork: every optimizer imports it, which takes a second
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.cli.paced import metrics_of
from fcp_cli.cost.profile import Coefficients, CostProfile, parse_cost_profile
from fcp_cli.plan.file import PlanReader
from fcp_cli.profiling.computed import ATTENTION_BACKWARD, CHUNK_BYTES_BACKWARD, CHUNK_BYTES_FORWARD
from fcp_cli.runtime import ring_passes
from fcp_cli.runtime.kernels import AttentionKernel, lse_dtype
from fcp_cli.runtime.layout import Segments
from fcp_cli.runtime.ring import current_ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.session import start
from fcp_cli.runtime.transport import Handle, Transport
from fcp_cli.util.network import free_ports

LAYERS, HEAD_DIM = 2, 8
MATRICES_BACKWARD = 2.0  # in multiples of forward
# K and V in bf16 forward and again backward, plus dK and dV in fp32: as in any bf16 model.
RING_BYTES_PER_TOKEN = LAYERS * 2 * HEAD_DIM * (2 + 2 + 4)
_MESSAGES_PER_HOP = 2 * LAYERS
_ARRIVED_SECONDS = 1e-3  # a shorter wait did not block


class Device:
    """Runs work in order, like an accelerator stream; the host sleeps until it is done.

    The host prepares the next work while the device is busy, so shorter preparation is free. Oversleeping does not
    lengthen work.
    """

    def __init__(self) -> None:
        self._free_at = 0.0
        self._last_seconds = 0.0

    def run(self, seconds: float) -> None:
        """Occupy the device for `seconds` after all earlier work."""
        begin = max(self._free_at, time.perf_counter() - self._last_seconds)
        self._free_at, self._last_seconds = begin + seconds, seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def hold(self, until: float) -> None:
        """Start no further work before `until` (`time.perf_counter`)."""
        self._free_at, self._last_seconds = max(self._free_at, until), 0.0


@dataclass(frozen=True, slots=True)
class PacedKernel:
    """Attention kernel that sleeps for the profile's time of its token pairs."""

    device: Device
    coefficients: Coefficients
    packed = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        self._run(segments, 1.0, CHUNK_BYTES_FORWARD)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=lse_dtype(q.dtype))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._run(segments, ATTENTION_BACKWARD, CHUNK_BYTES_BACKWARD)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _run(self, segments: Segments, forwards: float, chunk_bytes: float) -> None:
        # The profile's seconds are per squared length, of which a causal mask has half as pairs.
        pairs = 2.0 * self.coefficients.attention_seconds_per_token2 * pairs_of(segments)
        seconds = pairs * forwards / (1.0 + ATTENTION_BACKWARD)
        current = current_ring.get()
        if current is not None and not segments.causal:  # a ring hop, which adds to a result
            chunk = self.coefficients.chunk_seconds_per_token * current.tokens
            seconds += chunk * chunk_bytes / (CHUNK_BYTES_FORWARD + CHUNK_BYTES_BACKWARD)
        self.device.run(seconds / LAYERS)


def pairs_of(segments: Segments) -> float:
    """Return the number of (query, key) pairs; a causal mask has half."""
    pairs = sum(q * k for q, k in zip(segments.q_lengths, segments.k_lengths, strict=True))
    return pairs / 2 if segments.causal else float(pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Message times over a profile's links; bytes are scaled to the profile's model."""

    profile: CostProfile
    rank: int
    ranks_per_node: int

    def seconds(self, size: int, to: int) -> float:
        """Return the time of a message of `size` bytes to a rank."""
        c, bandwidth = self.profile.coefficients, self.profile.bandwidth
        is_near = to // self.ranks_per_node == self.rank // self.ranks_per_node
        rate = bandwidth.intra_node if is_near else bandwidth.inter_node
        return c.ring_hop_seconds / _MESSAGES_PER_HOP + size * c.ring_bytes_per_token / RING_BYTES_PER_TOKEN / rate


class PacedTransport:
    """A real transport whose messages arrive no earlier than over the profile's links."""

    def __init__(self, transport: Transport, device: Device, links: Links) -> None:
        self._transport, self._device, self._links = transport, device, links

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        away = max(
            self._links.seconds(tensor.nbytes, peer)
            for tensor, peer in ((send, to), (receive, source))
            if tensor is not None
        )
        due = time.perf_counter() + away
        return _PacedHop(self._transport.start(kind, send, to, receive, source), self._device, due)


@dataclass(frozen=True, slots=True)
class _PacedHop:
    hop: Handle
    device: Device
    due: float

    def wait(self) -> None:
        began = time.perf_counter()
        self.hop.wait()
        arrived = time.perf_counter()
        if self.due > arrived:
            time.sleep(self.due - arrived)
            self.device.hold(self.due)
        elif arrived - began > _ARRIVED_SECONDS:
            self.device.hold(arrived)


class PacedModel(nn.Module):
    """Layers of simulated matrices and attention over a real ring, with one small key/value head."""

    def __init__(self, device: Device, coefficients: Coefficients) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HEAD_DIM))
        self._device, self._coefficients = device, coefficients

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [1, tokens, HEAD_DIM] for input_ids [1, tokens]."""
        current = current_ring.get()
        assert current is not None
        if current.layout.lengths:  # an idle rank's padding costs nothing
            self._device.run(self._coefficients.microbatch_seconds)
        matrices = self._coefficients.linear_seconds_per_token * current.tokens / (1.0 + MATRICES_BACKWARD) / LAYERS
        hidden = self.weight.bfloat16().expand(1, input_ids.shape[1], HEAD_DIM)
        for _ in range(LAYERS):
            hidden = _Matrices.apply(hidden, self._device, matrices)  # type: ignore[no-untyped-call]
            heads = hidden.unsqueeze(1)
            hidden = attention(heads, heads, heads).squeeze(1)
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
    """Context manager: run the rings of this process on a paced device."""
    kernel: AttentionKernel = PacedKernel(device, coefficients)
    with mock.patch.object(ring_passes, "select_kernel", lambda device_type, dtype: kernel):
        yield


_FIRST_PORT = 29_700


def main(num_ranks: int, plans: Sequence[Path]) -> int:
    """Run the plans one after another on all ranks; on the first failure kill all ranks and return 1.

    Ranks are forked from this process, which has imported PyTorch, so that sixteen cost little more than one.
    """
    port = free_ports(_FIRST_PORT, 1)
    ranks = {_fork(rank, num_ranks, port, plans) for rank in range(num_ranks)}
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
            return 1
    return 0


def _fork(rank: int, num_ranks: int, port: int, plans: Sequence[Path]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        _run_rank(rank, num_ranks, port, plans)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _run_rank(rank: int, num_ranks: int, port: int, plans: Sequence[Path]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for plan in plans:
        _follow(plan)
    dist.barrier()  # rank 0 hosts the store
    dist.destroy_process_group()


def _follow(plan: Path) -> None:
    reader = PlanReader(plan)
    profile = parse_cost_profile(reader.metadata.cost_profile, name=str(plan))
    lengths: dict[int, int] = {}
    for planned in reader.steps():
        lengths |= zip(planned.sequences.tolist(), planned.lengths.tolist(), strict=True)
    device = Device()
    session = start(plan, lambda row: torch.zeros(lengths[row], dtype=torch.int64), metrics=metrics_of(plan))
    links = Links(profile=profile, rank=session.rank, ranks_per_node=reader.metadata.ranks_per_node)
    session.transport = PacedTransport(session.transport, device, links)
    model = PacedModel(device, profile.coefficients)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with session, attention_on(device, profile.coefficients):
        for step in session.steps(model):
            device.hold(time.perf_counter())
            for microbatch in step:
                loss = microbatch.loss(model(microbatch.input_ids))
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [Path(word) for word in sys.argv[2:]]))
