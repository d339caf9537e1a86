"""Timing on a device: a stopwatch that ignores other load, memory and clocks, messages between ranks, and kernels.

Messages are timed for selected pairs and growing sizes, with the cost of a first contact. All attention kernels of a
device are timed on the shapes of plans.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from fcp_cli.cost.kernels import KernelTiming, shape_class
from fcp_cli.cost.recipe import KERNELS
from fcp_cli.runtime.kernels.available import NamedKernel
from fcp_cli.runtime.kernels.select import ChosenKernel, Preference, Signature, unusable
from fcp_cli.runtime.layout import Segments
from fcp_cli.runtime.metrics import clock_for
from fcp_cli.runtime.transport import Transport
from fcp_cli.util.machine import cpu_name, host_memory_bytes


class Stopwatch:
    """Measures the time of work on a device, excluding the time that this thread waited for a core.

    Accelerators are timed with events on the stream. On a CPU, time in Linux's run queue (schedstat) is subtracted, if
    available. A result is never below the thread's CPU time, since skew between cores may inflate the queue time. If
    ranks share cores (`shares_cores`), waiting for a core is part of a job's time, and wall-clock time is used.
    """

    def __init__(self, device: torch.device, *, shares_cores: bool = False) -> None:
        self._device, self._clock = device, clock_for(device)
        self._leaves_waits_out = device.type == "cpu" and not shares_cores
        self._runs_ahead = device.type != "cpu"

    def measure(self, work: Callable[[], None]) -> float:
        """Run `work` and return its seconds."""
        waited, computed = run_queue_seconds(), time.thread_time()
        begin = self._clock.mark()
        work()
        seconds = self._clock.seconds(begin, self._clock.mark())
        if not self._leaves_waits_out:
            return seconds
        return max(seconds - (run_queue_seconds() - waited), time.thread_time() - computed)

    def measure_each(
        self, work: Callable[[], None], repeats: int, *, pause: Callable[[], None] | None = None
    ) -> list[float]:
        """Run `work` repeatedly and return the seconds of each run.

        On an accelerator, runs are back to back as in a job, without host synchronization. An uncounted first run
        absorbs idle clocks and late ranks.

        Args:
            work: work to time.
            repeats: number of runs.
            pause: called before each run on a CPU, so that ranks start together.
        """
        if not self._runs_ahead:
            found = []
            for _ in range(repeats):
                if pause is not None:
                    pause()
                found.append(self.measure(work))
            return found
        work()
        marks = [self._clock.mark()]
        for _ in range(repeats):
            work()
            marks.append(self._clock.mark())
        return [self._clock.seconds(begin, end) for begin, end in pairwise(marks)]

    def issue_each(self, work: Callable[[], None], repeats: int) -> list[float]:
        """Return the seconds in which the host issues `work` to an idle device, for each run."""
        found = []
        for _ in range(repeats):
            wait_for_device(self._device)
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        return found


def run_queue_seconds() -> float:
    """Return this thread's total time in the run queue; 0 if the system does not record it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def device_memory_bytes(device: torch.device, *, ranks_on_host: int) -> float:
    """Return the device memory; a host's memory is divided by its ranks."""
    if device.type == "cpu":
        return host_memory_bytes() / ranks_on_host
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> float:
    """Return free device memory; for a CPU all host memory, since free memory is unknown."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).mem_get_info(device)[0])
    return float(host_memory_bytes())


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def sm_clock_mhz(device: torch.device) -> float | None:
    """Return the current SM clock of an NVIDIA device in MHz, or None."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(_nvidia_smi("clocks.sm", device).split()[0])
    return None


def clocks(device: torch.device) -> str | None:
    """Return the current and maximum clocks of an NVIDIA device as text, or None."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError):
        figures = _nvidia_smi("clocks.sm,clocks.max.sm,clocks.mem,power.limit", device)
        return f"SM now, SM most, memory, power limit: {figures}"
    return None


def _nvidia_smi(figures: str, device: torch.device) -> str:
    # By UUID: CUDA_VISIBLE_DEVICES renumbers devices.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = ["nvidia-smi", f"--query-gpu={figures}", "--format=csv,noheader", f"--id={name}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def reset_peak(device: torch.device) -> None:
    """Restart the peak of `peak_bytes`.

    On a CPU this is the peak resident size, which Linux can reset. Since the C library keeps freed memory, only a peak
    above all earlier ones is meaningful: measure growing sizes, and use differences.
    """
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # 5 resets VmHWM to the current resident size; see proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> float | None:
    """Return the peak memory of this process since `reset_peak`, or None if not recorded."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None


def ranks_on_this_host() -> int:
    """Return the number of ranks that torchrun started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_KIB, _MIB = 1 << 10, 1 << 20
HOST_MOST_BYTES = 8 * _MIB  # on a host, the rate does not change above it
DEVICE_MOST_BYTES = 128 * _MIB
_LEAST_BYTES = 4 * _KIB  # small messages show the fixed cost, large ones the bandwidth
_SHARE_OF_FREE = 4  # each buffer takes at most 1/8 of the free memory
_CONTACT_BYTES = 4 * _KIB
_GROWTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PairKind:
    """A pattern of pairs: each rank sends to one rank and receives from another.

    Attributes:
        tier: `intra_node`, `inter_node` (equal local ranks: one rail), or `inter_node_cross_rail`, as in rings over
            parts of nodes.
        nodes, places: offset of the receiver in nodes and local ranks; both wrap around.
        ranks_per_node: ranks per node.
        world: number of ranks.
    """

    tier: str
    nodes: int
    places: int
    ranks_per_node: int
    world: int

    def to(self, rank: int) -> int:
        return self._shifted(rank, 1)

    def source(self, rank: int) -> int:
        return self._shifted(rank, -1)

    def _shifted(self, rank: int, sign: int) -> int:
        node, place = divmod(rank, self.ranks_per_node)
        num_nodes = self.world // self.ranks_per_node
        node = (node + sign * self.nodes) % num_nodes
        return node * self.ranks_per_node + (place + sign * self.places) % self.ranks_per_node


def links(world: int, ranks_per_node: int) -> list[PairKind]:
    """Return the pairs to time: inside a node, and between nodes on one rail and across rails."""
    shifts = {"intra_node": (0, 1), "inter_node": (1, 0), "inter_node_cross_rail": (1, 1)}
    return _possible(shifts, world, ranks_per_node)


def fresh_links(world: int, ranks_per_node: int) -> list[PairKind]:
    """Return pairs that a new transport's warm-up ring does not connect."""
    shifts = {"intra_node": (0, 2), "inter_node": (1, 1)}
    if ranks_per_node < 4:
        del shifts["intra_node"]  # with three ranks, an offset of 2 is an offset of -1
    return _possible(shifts, world, ranks_per_node)


def _possible(shifts: dict[str, tuple[int, int]], world: int, ranks_per_node: int) -> list[PairKind]:
    made = [
        PairKind(tier=tier, nodes=nodes, places=places, ranks_per_node=ranks_per_node, world=world)
        for tier, (nodes, places) in shifts.items()
    ]
    whole_nodes = world % ranks_per_node == 0
    return [
        link
        for link in made
        if (link.places == 0 or ranks_per_node > 1) and (link.nodes == 0 or (whole_nodes and world > ranks_per_node))
    ]


def most_message_bytes(device: torch.device) -> int:
    """Return the largest message size to time, so that two fit into free memory with room to spare."""
    most = HOST_MOST_BYTES if device.type == "cpu" else DEVICE_MOST_BYTES
    return max(_LEAST_BYTES, min(most, int(free_bytes(device) / (2 * _SHARE_OF_FREE))))


def message_sizes(most_bytes: int) -> list[int]:
    """Return the message sizes to time: 4 KiB, 64 KiB, 1 MiB, ..., and the largest."""
    sizes = [_LEAST_BYTES]
    while sizes[-1] * _GROWTH < most_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return [*sizes, most_bytes] if sizes[-1] < most_bytes else sizes


def gathered(values: Sequence[float]) -> list[list[float]]:
    """All-gather a list of values of equal length. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]


class Messenger:
    """Times messages over a transport; all methods are collective."""

    def __init__(self, transport: Transport, device: torch.device, stopwatch: Stopwatch) -> None:
        self._transport = transport
        self._device = device
        self._stopwatch = stopwatch

    def seconds(self, link: PairKind, num_bytes: int, *, repeats: int) -> list[float]:
        """Return message times [repeats], each from the least disturbed rank."""
        work = self._message(link, num_bytes)
        dist.barrier()  # otherwise a late rank would count as waiting on others
        everyone = gathered(self._stopwatch.measure_each(work, repeats, pause=dist.barrier))
        return [min(values) for values in zip(*everyone, strict=True)]

    def first_contact(self, link: PairKind) -> tuple[list[float], list[float] | None]:
        """Time the first message between unconnected pairs.

        Returns:
            Extra host seconds [ranks], and device bytes per new peer [ranks], or None on a CPU.
        """
        work = self._message(link, _CONTACT_BYTES)
        dist.barrier()
        before = free_bytes(self._device)
        first = self._host_seconds(work)
        after = free_bytes(self._device)
        again = self._host_seconds(work)
        rank = dist.get_rank()
        met = len({link.to(rank), link.source(rank)})
        everyone = gathered([max(0.0, first - again), max(0.0, before - after) / met])
        seconds, device_bytes = ([values[column] for values in everyone] for column in (0, 1))
        return seconds, None if self._device.type == "cpu" else device_bytes

    def _host_seconds(self, work: Callable[[], None]) -> float:
        wait_for_device(self._device)
        begin = time.perf_counter()
        work()
        wait_for_device(self._device)
        return time.perf_counter() - begin

    def _message(self, link: PairKind, num_bytes: int) -> Callable[[], None]:
        rank = dist.get_rank()
        send = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        receive = torch.empty_like(send)

        def exchange() -> None:
            self._transport.start("kv", send, link.to(rank), receive, link.source(rank)).wait()

        return exchange


BUDGET_SECONDS: Final = 20.0
_LEAST_TOKENS, _PACK_TOKENS, _MOST_TOKENS = 256, 16_384, 131_072
_REPEATS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Sequences of an attention call; a full mask represents a ring hop."""

    lengths: tuple[int, ...]
    causal: bool

    @property
    def pairs(self) -> float:
        """Number of query-key pairs, by which calls are ordered."""
        return sum(length * length for length in self.lengths) * (0.5 if self.causal else 1.0)

    def segments(self) -> Segments:
        return Segments(self.lengths, self.lengths, causal=self.causal)


def calls(most_tokens: int) -> list[Call]:
    """Return the calls to time, cheapest first: single sequences, equal packs and mixed packs.

    Args:
        most_tokens: maximum tokens of a call: the longest pack per rank.
    """
    most = min(most_tokens, _MOST_TOKENS)
    pack = min(_PACK_TOKENS, most)
    singles = [(length,) for length in _lengths(most)]
    equal = [(length,) * (pack // length) for length in _lengths(pack // 2)]
    mixed = [_spread(length, pack // length) for length in _lengths(pack // 2)]
    found = [Call(lengths=lengths, causal=causal) for lengths in (*singles, *equal, *mixed) for causal in (True, False)]
    return sorted(found, key=lambda call: call.pairs)


def _lengths(most: int) -> list[int]:
    lengths = [_LEAST_TOKENS]
    while lengths[-1] * 4 <= most:
        lengths.append(lengths[-1] * 4)
    return lengths


def _spread(mean: int, count: int) -> tuple[int, ...]:
    """Return lengths spread between 0.5 and 1.5 times the mean."""
    return tuple(mean // 2 + i * mean // max(1, count - 1) for i in range(count))


def time_kernels(
    device: torch.device, signature: Signature, most_tokens: int, *, budget_seconds: float = BUDGET_SECONDS
) -> list[KernelTiming]:
    """Return timings of all usable kernels, within budget and memory."""
    kernels = [ChosenKernel(Preference(asked=name)) for name in KERNELS if unusable(name, signature, device) is None]
    stopwatch, deadline = Stopwatch(device), time.monotonic() + budget_seconds
    found: list[KernelTiming] = []
    for call in calls(most_tokens):
        for chosen in kernels:
            if time.monotonic() > deadline:
                return found
            kernel = chosen.of(signature, call.segments(), device)
            if kernel.name == chosen.preference.asked:
                try:
                    found.append(_timed(kernel, call, signature, stopwatch, device))
                except torch.OutOfMemoryError:
                    return found
    return found


def _timed(
    kernel: NamedKernel, call: Call, signature: Signature, stopwatch: Stopwatch, device: torch.device
) -> KernelTiming:
    heads, kv_heads, head_dim, value_dim, dtype = signature
    tokens, segments, scale = sum(call.lengths), call.segments(), head_dim**-0.5
    sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    q, k, v, dout = (torch.randn(tokens, *size, device=device, dtype=dtype) for size in sizes)

    def forward() -> None:
        kernel.forward(q, k, v, segments, scale)

    def backward() -> None:
        kernel.backward(dout, q, k, v, out, lse, segments, scale)

    near = tuple(length - 1 for length in call.lengths)
    with torch.no_grad():
        # In training, lengths a token apart come before most shapes, and cuDNN may share a graph with them.
        q1, k1, v1, dout1 = (tensor[: sum(near)] for tensor in (q, k, v, dout))
        before = Segments(near, near, causal=call.causal)
        kernel.backward(dout1, q1, k1, v1, *kernel.forward(q1, k1, v1, before, scale), before, scale)
        wait_for_device(device)
        began = time.perf_counter()
        out, lse = kernel.forward(q, k, v, segments, scale)
        backward()
        wait_for_device(device)
        first = time.perf_counter() - began
        forward_seconds, backward_seconds = (
            statistics.median(stopwatch.measure_each(work, _REPEATS)) for work in (forward, backward)
        )
    shape = shape_class(call.lengths, causal=call.causal)
    return KernelTiming(
        kernel=kernel.name,
        mask=shape.mask,
        pack=shape.pack,
        tokens=shape.tokens,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        first_seconds=max(0.0, first - forward_seconds - backward_seconds),
    )
