"""Parts of `benchmarks.device_check`, each run by it in a process of its own:

    python -m benchmarks.device_parts FUNCTION DEVICE ROWS_FILE OUTPUT_FOLDER

A part yields rows, which are written as they come. On a CPU everything is smaller, to try the script.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from benchmarks.lockstep import LockstepTransport, run_lockstep
from benchmarks.ring_ops import Counter, pretended_gpu
from fcp_cli.cost.model import causal_work, group_seconds, joined
from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.cost.recipe import KERNELS, KernelName
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.profiling.samples import Measurement, read_samples
from fcp_cli.profiling.timing import Stopwatch, clocks, device_memory_bytes, device_name, wait_for_device
from fcp_cli.profiling.workload import SilentTransport, UpdateStep, Workload, build_model
from fcp_cli.runtime import rows as row_passes
from fcp_cli.runtime.kernels import AttentionKernel, preferring, select_kernel
from fcp_cli.runtime.kernels.select import ChosenKernel, Preference, Signature, unusable
from fcp_cli.runtime.layout import Rows, Segments, shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import attention, group_backward, group_forward
from fcp_cli.runtime.transport import ProcessWorld, join_process_group
from fcp_cli.verification.checks import (
    Attended,
    Case,
    attended,
    draw,
    exact,
    held_out,
    memory_error_percent,
    relative,
    squares,
)
from fcp_cli.verification.emulation import Mailbox

Row: TypeAlias = dict[str, Any]
MIB = 1 << 20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of Qwen3-8B

PACKS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (1, (1858, 1853, 1849, 1196, 608, 371, 54)),
    (1, (14930, 962, 324, 126)),
    (2, (25109,)),
    (2, (17205, 11073)),
    (4, (51882,)),
    (8, (131072,)),
)
"""Degree and lengths of packs of a plan: 64 ranks of 16,384 tokens, the GitHub-like lengths of `workloads`."""

_CPU_SHRINKS = 64  # lengths on a CPU are this much shorter
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a part, and the folder for files that outlive it."""

    device: torch.device
    output: Path

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_cpu else torch.bfloat16

    @property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device)

    @property
    def signature(self) -> Signature:
        return Signature(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, self.dtype)

    def packs(self) -> list[tuple[int, tuple[int, ...]]]:
        shrink = _CPU_SHRINKS if self.is_cpu else 1
        return [(degree, tuple(max(1, length // shrink) for length in lengths)) for degree, lengths in PACKS]

    def kernels(self) -> tuple[KernelName | None, ...]:
        """Return the kernels that run here; (None,) for the only one of a CPU."""
        if self.is_cpu:
            return (None,)
        return tuple(name for name in KERNELS if unusable(name, self.signature, self.device) is None)

    def kernel(self, name: KernelName | None, segments: Segments) -> AttentionKernel:
        """Return the kernel that runs a call if `name` is preferred."""
        if name is None:
            return select_kernel(self.device.type, self.dtype)
        return ChosenKernel(Preference(asked=name)).of(self.signature, segments, self.device)

    def inputs(self, segments: Segments, heads: tuple[int, int] = (HEADS, KV_HEADS)) -> tuple[Tensor, ...]:
        """Return q, k, v and the output's gradient of a call, drawn on the device."""
        rows, keys = sum(segments.q_lengths), sum(segments.k_lengths)
        sizes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
        return tuple(torch.randn(*size, HEAD_DIM, device=self.device, dtype=self.dtype) for size in sizes)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds of work, after a run that is not counted."""
        work()
        return statistics.median(self.stopwatch.measure_each(work, _REPEATS))


def machine(here: Device) -> Iterator[Row]:
    yield {"name": "device", "value": device_name(here.device)}
    yield {"name": "memory", "value": f"{device_memory_bytes(here.device, ranks_on_host=1) / 1e9:.1f} GB"}
    yield {"name": "clocks", "value": clocks(here.device)}
    for package in ("torch", "triton", "transformers", "numba", "numpy"):
        found = importlib.util.find_spec(package) is not None
        yield {"name": package, "value": importlib.import_module(package).__version__ if found else "not installed"}
    if here.is_cpu:
        return
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    yield {"name": "CUDA, cuDNN", "value": f"{torch.version.cuda}, {cudnn}"}
    for name in KERNELS:
        yield {
            "name": f"kernel {name}",
            "value": unusable(name, here.signature, here.device) or "passes its test calls",
        }


_REFERENCE_SCORES = 1 << 29  # elements of a sequence's scores in fp64, of which the reference holds several copies


def equality(here: Device) -> Iterator[Row]:
    for name in here.kernels():
        with nullcontext() if name is None else preferring(Preference(asked=name)):
            for degree, lengths in here.packs():
                if degree > 2:
                    continue  # the reference would not fit; `rings` covers hops
                fitting = _REFERENCE_SCORES // max(lengths) ** 2
                heads, kv_heads = (HEADS, KV_HEADS) if fitting >= HEADS else (2, 1) if fitting >= 2 else (1, 1)
                case = Case(heads=heads, kv_heads=kv_heads, head_size=HEAD_DIM, lengths=lengths)
                drawn = draw(case, here.dtype, here.device)
                found = attended(drawn, Ring(layout=shard_layout(lengths, 1)))
                error = relative([squares(found, exact(case, drawn))])
                yield {"kernel": _name(here, name), "pack": _pack(lengths), "heads": heads, "relative error": error}


def rings(here: Device) -> Iterator[Row]:
    lengths = (517, 1, 130) if here.is_cpu else (4099, 1, 1030, 64)
    for dtype in (torch.float32, torch.bfloat16):
        # fp32 runs as plain matrix products on accelerators, whatever kernel is preferred.
        for name in (None,) if dtype == torch.float32 else here.kernels():
            with nullcontext() if name is None else preferring(Preference(asked=name)):
                for degree, shared in ((2, 1), (3, 1), (4, 1), (4, 2)):
                    yield {"kernel": _name(here, name), **_ring(here, lengths, degree, shared, dtype)}


def _ring(here: Device, lengths: tuple[int, ...], degree: int, shared: int, dtype: torch.dtype) -> Row:
    case = Case(heads=8, kv_heads=2, head_size=HEAD_DIM, lengths=lengths)
    drawn = draw(case, dtype, here.device)
    wanted = exact(case, drawn)
    alone = relative([squares(attended(drawn, Ring(layout=shard_layout(lengths, 1))), wanted)])
    layout, ranks, mailbox = shard_layout(lengths, degree, shared), tuple(range(degree)), Mailbox()
    members = [Ring(layout, index, ranks, LockstepTransport(mailbox, index)) for index in ranks]
    positions = [torch.from_numpy(layout.index(index)) for index in ranks]
    own = [drawn.rows(rows.to(here.device)) for rows in positions]
    q, k, v, dout = (
        [tensor[0].transpose(0, 1).contiguous() for tensor in tensors] for tensors in zip(*own, strict=True)
    )
    spec = AttentionSpec(HEAD_DIM**-0.5)
    with torch.no_grad():
        calls = [group_forward(*given, spec) for given in zip(members, q, k, v, strict=True)]
        outs, kept = zip(*run_lockstep(calls), strict=True)
        grads = run_lockstep(
            [group_backward(*given, spec, kv_heads=2) for given in zip(members, dout, kept, strict=True)]
        )
    sums = []
    for index, rows in enumerate(positions):
        tensors = (outs[index], grads[index].q, grads[index].k, grads[index].v)
        found = Attended(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors))
        sums.append(squares(found, Attended(*(tensor.index_select(2, rows) for tensor in wanted))))
    return {
        "type": str(dtype).removeprefix("torch."),
        "degree": degree,
        "Ulysses": shared,
        "relative error": relative(sums),
        "one device": alone,
        "multiple": relative(sums) / alone,
    }


def times(here: Device) -> Iterator[Row]:
    for degree, lengths in here.packs():
        ring = shard_layout(lengths, degree).ring
        calls = {"own": (0, 0), "earlier": (1, 0), "later": (0, 1)}
        for call, (member, source) in list(calls.items())[: 1 if degree == 1 else 3]:
            (hop,) = ring.hops(member, source)
            for name in here.kernels():
                place = {"degree": degree, "pack": _pack(lengths), "call": call}
                yield {**place, **_timed(here, name, hop.segments)}


def _timed(here: Device, name: KernelName | None, segments: Segments) -> Row:
    q, k, v, dout = here.inputs(segments)
    kernel, scale = here.kernel(name, segments), HEAD_DIM**-0.5
    lengths = zip(segments.q_lengths, segments.k_lengths, strict=True)
    pairs = sum(rows * keys / (2 if segments.causal else 1) for rows, keys in lengths)
    with torch.no_grad():
        wait_for_device(here.device)
        began = time.perf_counter()
        out, lse = kernel.forward(q, k, v, segments, scale)
        kernel.backward(dout, q, k, v, out, lse, segments, scale)
        wait_for_device(here.device)
        first = time.perf_counter() - began
        forward = here.seconds(lambda: kernel.forward(q, k, v, segments, scale))
        backward = here.seconds(lambda: kernel.backward(dout, q, k, v, out, lse, segments, scale))
    flops = 4 * pairs * HEADS * HEAD_DIM
    ran = getattr(kernel, "name", None)
    return {
        "kernel": _name(here, name) + ("" if ran in (None, name) else f" (fell back to {ran})"),
        "forward ms": 1e3 * forward,
        "backward ms": 1e3 * backward,
        "forward TFLOP/s": flops / forward / 1e12,
        "backward TFLOP/s": 2.5 * flops / backward / 1e12,
        "first ms": 1e3 * first,
    }


def shapes(here: Device) -> Iterator[Row]:
    base = 67 if here.is_cpu else 4099
    # The kernel that it is about comes first.
    for name in (None,) if here.is_cpu else sorted(KERNELS, key=lambda name: name != "cudnn"):
        reason = None if name is None else unusable(name, here.signature, here.device)
        if reason is not None:
            yield {"kernel": name, "tokens": None, "thread": reason}
            continue
        for length in (base, base + 1, base + 2, base + 37):
            segments = Segments((length,), (length,), causal=True)
            # Once for the whole call, so that `ChosenKernel`'s own choice is not timed.
            kernel, inputs = here.kernel(name, segments), here.inputs(segments)
            for thread in ("main", "another"):
                row: Row = {"kernel": _name(here, name), "tokens": length, "thread": thread}
                worker = threading.Thread(target=_price_shape, args=(here, kernel, segments, inputs, row))
                # Graphs of cuDNN belong to a thread, and each of these lives for one call.
                if thread == "main":
                    worker.run()
                else:
                    worker.start()
                    worker.join()
                yield row


def _price_shape(
    here: Device, kernel: AttentionKernel, segments: Segments, inputs: tuple[Tensor, ...], row: Row
) -> None:
    q, k, v, dout = inputs
    scale = HEAD_DIM**-0.5

    def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
        wait_for_device(here.device)
        began = time.perf_counter()
        result = work()
        wait_for_device(here.device)
        return time.perf_counter() - began, result

    with torch.no_grad():
        first, (out, lse) = clocked(lambda: kernel.forward(q, k, v, segments, scale))
        again, _ = clocked(lambda: kernel.forward(q, k, v, segments, scale))

        def backward() -> object:
            return kernel.backward(dout, q, k, v, out, lse, segments, scale)

        first_back, again_back = clocked(backward)[0], clocked(backward)[0]
    row["forward ms"], row["backward ms"] = 1e3 * (first - again), 1e3 * (first_back - again_back)


def passes(here: Device) -> Iterator[Row]:
    tokens = 2048 if here.is_cpu else 16_384
    size = (64 if here.is_cpu else 1024) * MIB
    copied = _copy_rate(here, size)
    yield {"pass": "copy", "MiB": size / MIB, "GB/s": copied / 1e9, "of a copy": 1.0}
    # Backs of sequences of 64 tokens on a ring: every other 32 rows.
    scattered = Rows(None, np.arange(tokens, dtype=np.int64).reshape(-1, 2, 32)[:, 1].ravel())
    for place, where in (("span", Rows((tokens // 2, tokens))), ("scattered", scattered)):
        for name, make in _PASSES.items():
            counter, traced = Counter(), make(torch.device("meta"), tokens, where)
            with pretended_gpu(), counter:
                traced()
            work = make(here.device, tokens, where)
            if not counter.counts.moved_bytes:
                continue  # rows in one span are a view
            with torch.no_grad():
                seconds = here.seconds(work)
            rate = counter.counts.moved_bytes / seconds
            moved = counter.counts.moved_bytes / MIB
            yield {"pass": f"{name}, {place}", "MiB": moved, "GB/s": rate / 1e9, "of a copy": rate / copied}


def _copy_rate(here: Device, size: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    return size / here.seconds(lambda: target.copy_(source))


def _merge(device: torch.device, tokens: int, where: Rows) -> Callable[[], Any]:
    out, lse, _ = _row_tensors(device, tokens)
    part, part_lse, _ = _row_tensors(device, tokens // 2)
    precise = out.float()
    return lambda: row_passes.merge(precise, precise, None, lse, where, part, part_lse)


def _take(device: torch.device, tokens: int, where: Rows) -> Callable[[], Any]:
    out, lse, _ = _row_tensors(device, tokens)
    return lambda: row_passes.take_with_lse((out, out, out), lse, where)


def _add(device: torch.device, tokens: int, where: Rows) -> Callable[[], Any]:
    total, share = _row_tensors(device, tokens)[0].float(), _row_tensors(device, tokens // 2)[0]
    return lambda: row_passes.add(total, total, where, share)


def _add_pair(device: torch.device, tokens: int, where: Rows) -> Callable[[], Any]:
    pair, share = _row_tensors(device, tokens)[2], _row_tensors(device, tokens // 2)[2][0].to(torch.bfloat16)
    return lambda: row_passes.add_pair(pair, where, share, share)


def _row_tensors(device: torch.device, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of queries in bf16, log-sum-exps, and a pair of fp32 sums of keys and values."""
    return (
        torch.ones(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device),
        torch.zeros(tokens, HEADS, device=device),
        torch.zeros(2, tokens, KV_HEADS, HEAD_DIM, device=device),
    )


_PASSES = {"merge": _merge, "take with lse": _take, "add": _add, "add pair": _add_pair}


def host(here: Device) -> Iterator[Row]:
    columns = ("host forward us", "host both us", "device forward us", "device both us")
    found: dict[int, list[float]] = {}
    for degree in (1, 2, 4, 8):
        # Few tokens, so that the device never makes the host wait; 32 sequences have as many operations as one.
        layout = shard_layout((32,) * 32, degree)
        ring = Ring(layout, 0, tuple(range(degree)), SilentTransport())
        shape = (1, HEADS, layout.tokens(0), HEAD_DIM)
        q, dout = (torch.randn(shape, device=here.device, dtype=here.dtype) for _ in range(2))
        k, v = (torch.randn_like(q[:, :KV_HEADS]) for _ in range(2))
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

        def forward(leaves: list[Tensor] = leaves, ring: Ring = ring) -> None:
            with torch.no_grad():
                attention(*leaves, ring=ring)

        def both(leaves: list[Tensor] = leaves, ring: Ring = ring, dout: Tensor = dout) -> None:
            torch.autograd.grad(attention(*leaves, ring=ring), leaves, dout)

        both()
        issued = [statistics.median(here.stopwatch.issue_each(work, 20)) for work in (forward, both)]
        found[degree] = [1e6 * one for one in (*issued, here.seconds(forward), here.seconds(both))]
        yield {"degree": degree, **dict(zip(columns, found[degree], strict=True))}
    slope = [(found[8][column] - found[2][column]) / 6 for column in range(len(columns))]
    yield {"degree": "per hop", **dict(zip(columns, slope, strict=True))}


def profile(here: Device) -> Iterator[Row]:
    path = _measure(here, "qwen3-tiny" if here.is_cpu else "qwen3-8b", minutes=0.2 if here.is_cpu else 0.75)
    yield from _held_out(path)
    request, samples = _request(path)
    yield {"pack": "memory of a token", "error %": memory_error_percent(samples, request)}


def step(here: Device) -> Iterator[Row]:
    path = _measure(here, "qwen3-tiny" if here.is_cpu else "qwen3-1.7b", minutes=0.2 if here.is_cpu else 0.4)
    yield from _held_out(path)
    request, _ = _request(path)
    measured, spec = load_cost_profile(path), load_model(request.model)
    packs = [lengths for degree, lengths in here.packs() if degree == 1]
    join_process_group(here.device)
    model = build_model(spec, spec.num_layers, here.device, request.recipe)
    workload = Workload(model, here.device, request.recipe, SilentTransport())
    works = [workload.microbatch(lengths, (0,), 0) for lengths in packs]
    predicted = [_pack_seconds(measured, lengths) for lengths in packs]
    update = None
    for lengths, work, seconds in zip(packs, works, predicted, strict=True):
        yield _compared(_pack(lengths), seconds, here.seconds(work))
        update = update or UpdateStep(workload, ProcessWorld(), share=1.0)
    assert update is not None
    closing = measured.step.closing_seconds(request.sync)
    yield _compared("reduction, clipping, AdamW", closing, here.seconds(update.run))

    def whole() -> None:
        for work in works:
            work()
        update.run()

    yield _compared("the whole step", sum(predicted) + closing, here.seconds(whole))
    if here.is_cpu:
        return  # resident sizes are no measure of what is allocated
    torch.cuda.reset_peak_memory_stats(here.device)
    whole()
    wait_for_device(here.device)
    counted = rank_memory(spec, request.recipe, sync=request.sync, ranks=1).total_bytes(max(map(sum, packs)))
    allocated = torch.cuda.max_memory_allocated(here.device)
    row = {"pack": "peak of allocated memory, GB", "predicted": counted / 1e9, "measured": allocated / 1e9}
    yield {**row, "error %": 100 * (counted / allocated - 1)}


def _pack_seconds(profile: CostProfile, lengths: tuple[int, ...]) -> float:
    """Predict the seconds of a pack on one rank."""
    work = causal_work(np.array(lengths), profile.coefficients)
    pack = joined([work], lambda arrays: arrays[0].sum(keepdims=True))
    return float(group_seconds(profile, pack, degree=1, crosses_nodes=False)[0])


def _measure(here: Device, model: str, *, minutes: float) -> Path:
    """Run `fcp profile` of one rank; return the profile's path."""
    path = here.output / f"{model}.profile.yaml"
    for old in (path, path.with_suffix(".samples.jsonl")):
        old.unlink(missing_ok=True)
    words = ("profile", "--model", model, "--ranks", "1", "--device", here.device.type)
    limits = ("--budget-minutes", f"{minutes:g}", "--max-length", "512" if here.is_cpu else "32768", "-o", str(path))
    result = subprocess.run(
        [sys.executable, "-m", "fcp_cli", *words, *limits], capture_output=True, text=True, check=False
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"fcp profile ended with status {result.returncode}")
    return path


def _request(path: Path) -> tuple[Measurement, Any]:
    """Return the request that a profile's samples were measured by, and the samples."""
    samples = read_samples(path.with_suffix(".samples.jsonl"))
    fields = {name: getattr(samples.subject, name) for name in samples.subject.__dataclass_fields__}
    return Measurement(**fields, budget_seconds=0.0, samples=samples.path), samples


def _held_out(path: Path) -> Iterator[Row]:
    for point in held_out(load_cost_profile(path)):
        name = f"degree {point['degree']}, {_pack(tuple(point['lengths']))}"
        yield _compared(name, float(point["predicted_seconds"]), float(point["seconds"]))


def _compared(name: str, predicted: float, measured: float) -> Row:
    row = {"pack": name, "predicted": predicted, "measured": measured}
    return {**row, "error %": 100 * (predicted / measured - 1) if measured else math.nan}


def _name(here: Device, name: KernelName | None) -> str:
    return name or ("cpu" if here.is_cpu else "plain")


def _pack(lengths: tuple[int, ...]) -> str:
    return f"{sum(lengths):,} tokens in {len(lengths)}"


PARTS: dict[str, Callable[[Device], Iterator[Row]]] = {
    part.__name__: part for part in (machine, equality, rings, times, shapes, passes, host, profile, step)
}


def main(argv: list[str]) -> None:
    name, device, rows, output = argv
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    here = Device(device=torch.device("cuda", 0) if device == "cuda" else torch.device(device), output=Path(output))
    with Path(rows).open("a", encoding="utf-8") as file:
        for row in PARTS[name](here):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
