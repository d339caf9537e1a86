"""Checks of `fcp selftest` on a rank: machine, messages, kernels against fp64, rings, overlap, and predicted packs.

`Bench` is their context. Steps that could hang are checked by `step_ends`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import KERNELS, KernelName
from fcp_cli.errors import ProfileError
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.profiling.fits import profile_from_samples, text_bytes_per_token
from fcp_cli.profiling.samples import Measurement, SamplesFile, read_measurement, read_samples
from fcp_cli.profiling.timing import (
    Messenger,
    Stopwatch,
    clocks,
    device_memory_bytes,
    device_name,
    fresh_links,
    gathered,
    links,
    most_message_bytes,
    ranks_on_this_host,
)
from fcp_cli.profiling.worker import Measurer, job_variables
from fcp_cli.profiling.workload import SilentTransport
from fcp_cli.runtime.kernels import preferring, select_kernel
from fcp_cli.runtime.kernels.select import GENERIC, Preference, unusable
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.transport import ProcessTransport, ProcessWorld, Transport
from fcp_cli.util.findings import Finding
from fcp_cli.util.machine import usable_cores
from fcp_cli.verification.emulation import Meeting, ThreadTransport, run_ranks
from fcp_cli.verification.selftest import Settings


class Bench:
    """Context of a rank in the self-test.

    Attributes:
        dtype: attention dtype: bf16 on accelerators, fp32 on a CPU.
        degrees: ring degrees to test, at most 8.
        sharers: number of ranks that share a CPU host; 1 if each rank has its own device.
        kernels: attention kernels available on all ranks; (None,) if the device has a single one.
        unavailable: why this or another rank cannot run a kernel, by kernel.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.world = ProcessWorld()
        self.ranks_per_node = ranks_on_this_host()
        self.sharers = self.ranks_per_node if device.type == "cpu" else 1
        self.transport = ProcessTransport.create(device)
        self.stopwatch = Stopwatch(device)
        self.degrees = range(2, min(8, self.world.size) + 1)
        self.kernels: tuple[KernelName | None, ...] = (None,)
        self.unavailable: dict[KernelName, str] = {}
        if device.type == "cuda":
            self._find_kernels()

    gather = staticmethod(gathered)

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def begin(self, action: str) -> None:
        """Record the next action, so that a hang can be located."""
        if self.is_first:
            self.settings.diary.begin(action)

    @contextmanager
    def running(self, kernel: KernelName | None) -> Iterator[None]:
        """Prefer an attention kernel within the block; None: the device's only one."""
        if kernel is None:
            yield
            return
        with preferring(Preference(asked=kernel)):
            yield

    def _find_kernels(self) -> None:
        reasons = {name: unusable(name, GENERIC, self.device) for name in KERNELS}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
        everywhere = self.gather([float(name not in self.unavailable) for name in KERNELS])
        self.kernels = tuple(name for i, name in enumerate(KERNELS) if all(row[i] for row in everywhere))
        for name in KERNELS:
            if name not in self.kernels:
                self.unavailable.setdefault(name, "another rank cannot run it")


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
    """An attention call: heads, head sizes (values have another one if given), and sequence lengths of its pack."""

    heads: int
    kv_heads: int
    head_size: int
    lengths: tuple[int, ...]
    value_size: int | None = None

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
    value_size = case.value_size or case.head_size
    sizes = [(case.heads, case.head_size), (case.kv_heads, case.head_size)]
    sizes += [(case.kv_heads, value_size), (case.heads, value_size)]
    shapes = [(1, heads, case.tokens, size) for heads, size in sizes]
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


def check_kernel(bench: Bench) -> Finding:
    """Compare each attention kernel with fp64 for several shapes, on each device.

    Shapes cover grouped heads, head sizes, length 1, and many segments. If a kernel does not support a shape, its
    fallback is compared.
    """
    errors: dict[str, float] = {}
    every = [(kernel, case) for kernel in bench.kernels for case in cases(quick=bench.settings.quick)]
    for start in range(0, len(every), bench.sharers):
        batch = every[start : start + bench.sharers]
        names = [case.describe() if kernel is None else f"{kernel}, {case.describe()}" for kernel, case in batch]
        bench.begin(f"kernel: {'; '.join(names)}")
        found = [0.0] * len(names)
        mine = bench.world.rank % bench.sharers  # ranks on the same host divide the cases
        if mine < len(names):
            found[mine] = _error(bench, *every[start + mine])
        errors |= dict(zip(names, map(max, zip(*bench.gather(found), strict=True)), strict=True))
    worst = max(errors, key=lambda name: errors[name])
    bound = BOUNDS[bench.dtype]
    kernels = [name for name in bench.kernels if name is not None]
    compared = f" on {', '.join(kernels)}" if kernels else ""
    return Finding(
        name="kernel",
        passed=all(error <= bound for error in errors.values()),
        lines=(
            f"{len(errors)} cases{compared} against fp64, worst error {errors[worst]:.1e} of {bound:.0e} allowed: "
            f"{worst}",
            *(f"not {name}: {reason}" for name, reason in bench.unavailable.items()),
        ),
        figures={"bound": bound, "relative_error_by_case": errors, "unavailable_kernels": bench.unavailable},
    )


def _error(bench: Bench, kernel: KernelName | None, case: Case) -> float:
    drawn = draw(case, bench.dtype, bench.device)
    with bench.running(kernel):
        found = attended(drawn, Ring(layout=shard_layout(case.lengths, 1)))
    return relative([squares(found, exact(case, drawn))])


def cases(*, quick: bool) -> list[Case]:
    """Return the calls to compare."""
    segments = tuple(random.Random(0).randint(1, 6 if quick else 24) for _ in range(500))
    long = 96 if quick else 1024
    shapes = [(4, 4, 64), (4, 1, 128), (4, 2, 192), (2, 2, 256)] if quick else _SHAPES
    return [
        *(Case(heads=h, kv_heads=g, head_size=d, lengths=(long, 1, long // 3)) for h, g, d in shapes),
        Case(heads=4, kv_heads=2, head_size=64, lengths=(1,)),
        Case(heads=2, kv_heads=1, head_size=64, lengths=segments),
    ]


_SHAPES = [(32, 32, 64), (32, 8, 64), (16, 4, 96), (32, 8, 128), (16, 1, 128), (8, 4, 192), (8, 2, 256)]


def attended(drawn: Drawn, ring: Ring) -> Attended:
    """Run the runtime's attention forward and backward on this rank's rows."""
    leaves = [tensor.detach().requires_grad_() for tensor in drawn[:3]]
    out = attention(*leaves, ring=ring)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(out, leaves, drawn.dout)
    return Attended(out.detach(), *gradients)


_KIB, _MIB = 1 << 10, 1 << 20
_MESSAGE_REPEATS = 8
_NAMES = {
    "intra_node": "in a node",
    "inter_node": "between nodes, one rail",
    "inter_node_cross_rail": "between nodes, across rails",
}


def check_links(bench: Bench) -> Finding:
    """Time first contacts before anything else is sent, then messages of growing size."""
    messenger = Messenger(bench.transport, bench.device, bench.stopwatch)
    contacts: dict[str, Any] = {}
    lines = []
    for link in fresh_links(bench.world.size, bench.ranks_per_node):
        bench.begin(f"links: first contact {_NAMES[link.tier]}")
        held_up, device_bytes = messenger.first_contact(link)
        milliseconds = 1e3 * statistics.median(held_up)
        megabytes = None if device_bytes is None else statistics.median(device_bytes) / 1e6
        contacts[link.tier] = {"milliseconds": milliseconds, "device_megabytes": megabytes}
        memory = "" if megabytes is None else f", {megabytes:,.0f} MB a peer"
        lines.append(f"first contact {_NAMES[link.tier]}: {milliseconds:.3g} ms{memory}")
    rates: dict[str, dict[str, float]] = {}
    for link in links(bench.world.size, bench.ranks_per_node):
        rates[link.tier] = {}
        for num_bytes in _sizes(bench):
            bench.begin(f"links: {num_bytes:,} bytes {_NAMES[link.tier]}")
            seconds = statistics.median(messenger.seconds(link, num_bytes, repeats=_MESSAGE_REPEATS))
            rates[link.tier][str(num_bytes)] = num_bytes / seconds / 1e9
        told = ", ".join(f"{_size(int(size))} {rate:.3g}" for size, rate in rates[link.tier].items())
        lines.append(f"GB/s {_NAMES[link.tier]}: {told}")
    if bench.device.type == "cuda" and bench.world.size > bench.ranks_per_node:
        lines.append(f"channels per peer: {_channels(os.environ)}")
    return Finding(
        name="links",
        passed=None,
        lines=tuple(lines) or ("a single rank sends no messages",),
        figures={"first_contact": contacts, "gigabytes_per_second_by_size": rates},
    )


def _channels(variables: Mapping[str, str]) -> str:
    """Return the channels of a message on several nodes, which NCCL tells its log alone."""
    given = variables.get("NCCL_NCHANNELS_PER_NET_PEER")
    if given is not None:
        return f"{given}, by NCCL_NCHANNELS_PER_NET_PEER"
    return "NCCL's choice, 1 to 4, in nodes, too; NCCL_DEBUG=INFO logs it, NCCL_NCHANNELS_PER_NET_PEER=8 sets it"


def _sizes(bench: Bench) -> list[int]:
    """Return 64 KiB, 1 MiB, 16 MiB and 256 MiB, as far as every rank's memory holds two such messages."""
    most = min(int(room) for (room,) in bench.gather([float(2 * most_message_bytes(bench.device))]))
    largest = _MIB if bench.settings.quick else most
    return [size for size in (64 * _KIB, _MIB, 16 * _MIB, 256 * _MIB) if size <= largest]


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB" if num_bytes >= _MIB else f"{num_bytes // _KIB} KiB"


_OVERLAP_REPEATS = 6
_MOST_EXPOSED, _NOISE = 0.5, 0.05  # shares of the messages' own time, and of the kernels'


def check_overlap(bench: Bench) -> Finding:
    """Time a sequence at each degree, with messages and with a transport that sends nothing.

    On accelerators, a forward that shows most of what its messages take alone fails: attention hides none of its own.
    """
    found: dict[str, dict[str, float]] = {}
    starved = []
    for degree in bench.degrees:
        bench.begin(f"overlap: degree {degree}")
        with_messages, silent = (_seconds(bench, degree, carried) for carried in (bench.transport, SilentTransport()))
        found[str(degree)] = {
            name: 100.0 * (long / short - 1.0)
            for name, long, short in zip(("forward", "backward"), with_messages, silent, strict=True)
        }
        alone = _message_seconds(bench, degree)
        if with_messages[0] - silent[0] > max(_MOST_EXPOSED * alone, _NOISE * silent[0]):
            starved.append(f"degree {degree}: forward waits for most of the {1e3 * alone:.3g} ms of its messages")
    lines = tuple(
        f"degree {degree}: forward {percent['forward']:+.0f} %, backward {percent['backward']:+.0f} %"
        for degree, percent in found.items()
    )
    head = ("longer than the same kernels without messages:",) if lines else ("a single rank has no rings",)
    if starved:
        starved.append(
            "a kernel that fills the device until it ends (FlashAttention 3) or a single hardware queue "
            "(CUDA_DEVICE_MAX_CONNECTIONS=1) holds messages up: try --attention-kernel cudnn or fa2"
        )
    passed = None if bench.device.type == "cpu" or not lines else not starved
    return Finding(name="overlap", passed=passed, lines=(*head, *lines, *starved), figures={"longer_percent": found})


def _message_seconds(bench: Bench, degree: int) -> float:
    """Return the median seconds of a forward's messages without kernels, on rank 0."""
    rank, case = bench.world.rank, _overlap_case(bench, degree)
    seconds = 0.0
    if rank < degree:
        shape = (2, sum(case.lengths) // degree, case.kv_heads, case.head_size)
        sent, received = (torch.zeros(shape, dtype=bench.dtype, device=bench.device) for _ in range(2))

        def travel() -> None:
            for _ in range(degree - 1):
                bench.transport.start("kv", sent, (rank + 1) % degree, received, (rank - 1) % degree).wait()

        seconds = _median(bench, travel)
    (first, *_) = bench.gather([seconds])
    return first[0]


def _seconds(bench: Bench, degree: int, transport: Transport) -> tuple[float, float]:
    """Return median forward and backward seconds on rank 0; ranks outside the ring only wait."""
    rank = bench.world.rank
    if rank >= degree:
        (first, *_) = bench.gather([0.0, 0.0])
        return first[0], first[1]
    case = _overlap_case(bench, degree)
    layout = shard_layout(case.lengths, degree)
    rows = torch.from_numpy(layout.index(rank)).to(bench.device)
    drawn = draw(case, bench.dtype, bench.device).rows(rows)
    leaves = [tensor.detach().requires_grad_() for tensor in drawn[:3]]
    ring = Ring(layout=layout, index=rank, ranks=tuple(range(degree)), transport=transport)

    def forward() -> None:
        with torch.no_grad():
            attention(*leaves, ring=ring)

    def both() -> None:
        torch.autograd.grad(attention(*leaves, ring=ring), leaves, drawn.dout)

    once, twice = (_median(bench, work) for work in (forward, both))
    (first, *_) = bench.gather([once, max(twice - once, 1e-9)])
    return first[0], first[1]


def _median(bench: Bench, work: Callable[[], None]) -> float:
    work()
    return statistics.median(bench.stopwatch.measure_each(work, _OVERLAP_REPEATS))


def _overlap_case(bench: Bench, degree: int) -> Case:
    """Return a sequence with the same number of tokens per rank at every degree."""
    if bench.device.type == "cpu":
        return Case(heads=4, kv_heads=2, head_size=64, lengths=((128 if bench.settings.quick else 512) * degree,))
    return Case(heads=32, kv_heads=8, head_size=128, lengths=((2048 if bench.settings.quick else 8192) * degree,))


_PACKS = 5
# Checked only on accelerators: on a CPU, times and resident sizes depend on other load.
_MOST_ERROR_PERCENT = 15.0
_MOST_MEMORY_ERROR_PERCENT = 10.0


def check_packs(bench: Bench) -> Finding:
    """Measure packs for the requested time, like `fcp profile`, and compare the held-out ones."""
    bench.begin("packs: forward and backward of a model")
    request = read_measurement(bench.settings.measurement)
    Measurer(request, bench.device).run()
    if not bench.is_first:
        return Finding(name="packs", passed=None, lines=())
    samples = read_samples(request.samples)
    try:
        profile = profile_from_samples(samples)
    except ProfileError as error:
        return Finding(name="packs", passed=False, lines=(str(error),))
    judged = bench.device.type != "cpu"
    return _finding(request, profile, memory_error_percent(samples, request), judged=judged)


def _finding(request: Measurement, profile: CostProfile, memory_percent: float | None, *, judged: bool) -> Finding:
    points = held_out(profile)
    errors = [abs(point["error_percent"]) for point in points]
    mean = sum(errors) / len(errors) if errors else None
    lines = [
        f"{request.model}, {request.recipe.describe()}: predicted against measured on {len(points)} held-out packs, "
        f"mean error {'-' if mean is None else f'{mean:.1f} %'}"
    ]
    lines += [
        f"degree {point['degree']}, {sum(point['lengths']):,} tokens in {len(point['lengths'])}: "
        f"{1e3 * point['predicted_seconds']:.3g} ms, measured {1e3 * point['seconds']:.3g} ms"
        for point in points
    ]
    if memory_percent is not None:
        quantity = "bytes allocated" if judged else "resident size, which is coarse,"
        lines.append(f"memory of a token: {quantity} {memory_percent:+.1f} % against the estimate")
    passed = None
    if judged and mean is not None:
        passed = mean <= _MOST_ERROR_PERCENT and abs(memory_percent or 0.0) <= _MOST_MEMORY_ERROR_PERCENT
    figures = {"packs": points, "mean_error_percent": mean, "memory_error_percent": memory_percent}
    return Finding(name="packs", passed=passed, lines=tuple(lines), figures=figures)


def held_out(profile: CostProfile) -> list[dict[str, Any]]:
    """Return up to five held-out packs, from cheapest to most expensive."""
    points = [point for point in profile.measurement["points"] if point["held_out"]]
    points.sort(key=lambda point: float(point["seconds"]))
    if len(points) <= _PACKS:
        return points
    return [points[number * (len(points) - 1) // (_PACKS - 1)] for number in range(_PACKS)]


def memory_error_percent(samples: SamplesFile, request: Measurement) -> float | None:
    """Return by how many percent a token's measured memory on a single rank exceeds the estimate, or None."""
    spec = load_model(request.model)
    measured = text_bytes_per_token(samples, spec)
    if measured is None:
        return None
    alone = rank_memory(spec, request.recipe, sync=request.sync, ranks=1, on_cpu=request.device == "cpu")
    longest = max(int(line["tokens"]) for line in samples.of_kind("memory"))
    # The micro-batch's moment: reduction and update hold no tokens.
    running = max((moment for moment in alone.moments if moment.bytes_per_token), key=lambda one: one.bytes_at(longest))
    return 100.0 * (measured / running.bytes_per_token - 1.0)


MOST_MULTIPLE = 2.0
"""Maximum error of a ring, as a multiple of a single device's error."""
_FLOOR = 2e-6  # smaller errors are rounding, whatever the single device's error


def check_rings(bench: Bench) -> Finding:
    """Compare each degree up to 8, on the first and on the last ranks."""
    multiples: dict[str, float] = {}
    passed = True
    for kernel, (ranks, shared) in product(bench.kernels, list(_groups(bench))):
        sets = "" if shared == 1 else f", {shared} share heads"
        name = f"degree {len(ranks)}, ranks {ranks[0]}-{ranks[-1]}{sets}{'' if kernel is None else f', {kernel}'}"
        bench.begin(f"rings: {name}")
        with bench.running(kernel):
            error, own_error = _errors(bench, ranks, shared)
        multiples[name] = error / max(own_error, 1e-30)
        passed = passed and error <= max(MOST_MULTIPLE * own_error, _FLOOR)
    emulated = _EMULATED if bench.device.type == "cpu" else {}
    for degree, shared in emulated.items():
        name = f"degree {degree} emulated" + ("" if shared == 1 else f", {shared} share heads")
        bench.begin(f"rings: {name}")
        (error, own_error), *_ = bench.gather(_emulated_errors(degree, shared) if bench.is_first else [0.0, 0.0])
        multiples[name] = error / max(own_error, 1e-30)
        passed = passed and error <= max(MOST_MULTIPLE * own_error, _FLOOR)
    if not multiples:
        return Finding(name="rings", passed=None, lines=("a single rank has no rings",))
    worst = max(multiples, key=lambda name: multiples[name])
    return Finding(
        name="rings",
        passed=passed,
        lines=(
            f"degrees {', '.join(map(str, sorted({*bench.degrees, *emulated})))}, worst {multiples[worst]:.2f} x one "
            f"device's own error: {worst}",
        ),
        figures={"multiple_of_own_error": multiples, "most_multiple": MOST_MULTIPLE},
    )


# By degree, how many share heads: rings that this host may be too small for, with members as threads of one process.
_EMULATED = {3: 1, 4: 2, 5: 1}


def _emulated_errors(degree: int, shared: int) -> list[float]:
    """Return the relative errors of a ring of threads and of one, on a CPU.

    One key/value head, which ranks that share heads replicate, and values of another size than keys.
    """
    case = Case(heads=4, kv_heads=1, head_size=64, lengths=(97, 1, 5, 40), value_size=32)
    drawn = draw(case, torch.float32, torch.device("cpu"))
    wanted = exact(case, drawn)
    layout = shard_layout(case.lengths, degree, shared)

    def member(meeting: Meeting, index: int) -> list[float]:
        rows = torch.from_numpy(layout.index(index))
        ring = Ring(layout, index, tuple(range(degree)), ThreadTransport(meeting.mailbox, index, 60.0))
        return squares(attended(drawn.rows(rows), ring), Attended(*(one.index_select(2, rows) for one in wanted)))

    alone = squares(attended(drawn, Ring(layout=shard_layout(case.lengths, 1))), wanted)
    return [relative(run_ranks(degree, member)), relative([alone])]


def _groups(bench: Bench) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (ranks, Ulysses degree) for the first and last ranks of each degree."""
    heads = _mixed_case(bench).heads
    for degree in bench.degrees:
        first, last = tuple(range(degree)), tuple(range(bench.world.size - degree, bench.world.size))
        for ranks in dict.fromkeys((first, last)):
            yield ranks, 1
        for shared in (2, 4):
            if not degree % shared and not heads % shared:
                yield first, shared


def _errors(bench: Bench, ranks: tuple[int, ...], shared: int) -> tuple[float, float]:
    """Return the relative errors of a ring and of a single device, for the same pack."""
    case = _mixed_case(bench)
    drawn = draw(case, bench.dtype, bench.device)
    wanted = exact(case, drawn)
    alone = squares(attended(drawn, Ring(layout=shard_layout(case.lengths, 1))), wanted)
    mine = [0.0, 0.0]
    if bench.world.rank in ranks:
        index = ranks.index(bench.world.rank)
        layout = shard_layout(case.lengths, len(ranks), shared)
        rows = torch.from_numpy(layout.index(index))
        own = Drawn(*drawn).rows(rows.to(bench.device))
        found = attended(own, Ring(layout=layout, index=index, ranks=ranks, transport=bench.transport))
        mine = squares(found, Attended(*(tensor.index_select(2, rows) for tensor in wanted)))
    everyone = bench.gather([*mine, *alone])
    return relative([row[:2] for row in everyone]), relative([everyone[0][2:]])


def _mixed_case(bench: Bench) -> Case:
    """Return a pack with sequences shorter than the ring and one much longer."""
    if bench.settings.quick:
        return Case(heads=4, kv_heads=2, head_size=64, lengths=(97, 1, 5, 40))
    if bench.device.type == "cpu":
        return Case(heads=4, kv_heads=2, head_size=64, lengths=(517, 1, 7, 130, 64))
    return Case(heads=8, kv_heads=2, head_size=128, lengths=(2049, 1, 7, 513, 64, 3))


_PACKAGES = (
    "torch",
    "torch-npu",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "triton",
)


def check_surroundings(bench: Bench) -> Finding:
    """Report versions, devices, topology, the selected kernel, and variables that back ends read."""
    device = bench.device
    kernels = [name for name in bench.kernels if name is not None]
    kernel = "/".join(kernels) or type(select_kernel(device.type, bench.dtype)).__name__
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    figures = {
        "device": device.type,
        "device_name": device_name(device),
        "device_memory_bytes": device_memory_bytes(device, ranks_on_host=bench.ranks_per_node),
        "ranks": bench.world.size,
        "ranks_per_node": bench.ranks_per_node,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "versions": versions,
        "backend_version": _backend_version(device),
        "kernel": kernel,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "clocks": clocks(device),
        "topology": _topology(device),
        "variables": job_variables(),
    }
    back_end = f", {figures['backend_version']}" if figures["backend_version"] else ""
    return Finding(
        name="machine",
        passed=None,
        lines=(
            f"{bench.world.size} ranks, {bench.ranks_per_node} a node, of {figures['device_name']}, "
            f"{device_memory_bytes(device, ranks_on_host=bench.ranks_per_node) / 1e9:.1f} GB each{back_end}",
            f"kernel {kernel} in {figures['dtype']}; " + ", ".join(f"{name} {v}" for name, v in versions.items()),
            " ".join(f"{name}={value}" for name, value in job_variables().items()) or "no variables set",
        ),
        figures=figures,
    )


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _backend_version(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"CUDA {torch.version.cuda}, NCCL {version}"


def _topology(device: torch.device) -> str | None:
    """Return the device topology of this node, as the driver prints it."""
    command = {"cuda": ["nvidia-smi", "topo", "-m"], "npu": ["npu-smi", "info", "-t", "topo"]}.get(device.type)
    if command is not None:
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return None
