"""CUDA kernels of a job: those of attention, agreed on by all ranks and printed, and those that Triton compiles.

Apart from `rank_agreement`, since it reads the plan's cost profile, which other jobs need not import.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from fcp_cli.cost.kernels import KernelTable, default_order
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.cost.recipe import KERNEL_VARIABLE, KERNELS, KernelName
from fcp_cli.errors import RunError
from fcp_cli.models.model import known_model
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.kernels import prefer
from fcp_cli.runtime.kernels.available import is_rocm, major_capability, unavailability
from fcp_cli.runtime.kernels.cudnn import least_unmeasured_tokens
from fcp_cli.runtime.kernels.select import GENERIC, Preference, Signature, asked_kernel, unusable
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import group_backward, group_forward
from fcp_cli.runtime.rows import fused_rows
from fcp_cli.runtime.transport import Handle, Waits, World, gather_words

_USABLE, _UNAVAILABLE, _FAILED = range(3)
_NOTABLE_RATIO: Final = 1.05  # of attention times, under another kernel than the profile's


def prefer_agreed_kernels(world: World, device: torch.device, metadata: PlanMetadata) -> None:
    """Make all ranks choose CUDA kernels in the same way. Collective: every rank of a job on CUDA calls it."""
    profile = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
    preference, lines = agree_on_kernels(world, device, profile)
    prefer(preference)
    for line in lines:
        print(f"fcp: {line}", file=sys.stderr, flush=True)


def agree_on_kernels(world: World, device: torch.device, profile: CostProfile) -> tuple[Preference, tuple[str, ...]]:
    """Run each kernel's test call on every rank, and exclude kernels that fail on any rank.

    Returns:
        The preference of all ranks, and the lines for this rank to print: on rank 0 the choice, on other ranks the
        errors of failed test calls.
    """
    value = os.environ.get(KERNEL_VARIABLE) or "auto"
    known = ("auto", *KERNELS)
    table = _table_of(profile, device)
    reasons = _reasons(table, device, asked_kernel(value) if value in known else None)
    states = [_state(name, reasons.get(name)) for name in KERNELS]
    code = known.index(value) if value in known else len(known)
    rows = gather_words(world, (code, *states), device)
    asked = asked_kernel(value)
    for rank, (other, *_) in enumerate(rows):
        if other != rows[0][0]:
            raise RunError(f"{KERNEL_VARIABLE} differs between rank 0 and rank {rank}; set it alike on all nodes")
    _require(asked, rows, reasons)
    excluded = {name: _ranks(rows, i) for i, name in enumerate(KERNELS) if _ranks(rows, i)}

    def report(line: str) -> None:
        print(f"fcp: rank {world.rank}: {line}", file=sys.stderr, flush=True)

    preference = Preference(asked=asked, table=table, excluded=frozenset(excluded), report=report)
    if world.rank:
        mine = [name for name, state in zip(KERNELS, states, strict=True) if state == _FAILED]
        return preference, tuple(f"rank {world.rank}: attention kernel {name}: {reasons[name]}" for name in mine)
    failed = [_failed_line(name, rows, reasons) for i, name in enumerate(KERNELS) if _ranks(rows, i, _FAILED)]
    return preference, (*_lines(preference, profile), *failed)


def _table_of(profile: CostProfile, device: torch.device) -> KernelTable | None:
    """Return the profile's kernel table if it was measured on this device model."""
    table = profile.attention_kernels
    return table if table and table.device == torch.cuda.get_device_name(device) and table.timings else None


def _reasons(table: KernelTable | None, device: torch.device, asked: KernelName | None) -> dict[KernelName, str | None]:
    """Return the reason why this rank cannot use each kernel, or None; only kernels that may run are tested."""
    order = default_order(major_capability(), rocm=is_rocm())[0]
    measured = () if table is None else tuple(timing.kernel for timing in table.timings)
    names = dict.fromkeys((*(() if asked is None else (asked,)), *measured, *order))
    signature = GENERIC if table is None else _signature(table)
    return {name: unusable(name, signature, device) for name in names}


def _signature(table: KernelTable) -> Signature:
    heads, kv_heads, head_dim = table.heads
    return Signature(heads, kv_heads, head_dim, head_dim, torch.bfloat16)


def _state(name: KernelName, reason: str | None) -> int:
    if reason is None:
        return _USABLE
    return _UNAVAILABLE if unavailability(name) is not None else _FAILED


def _ranks(rows: list[list[int]], kernel: int, *states: int) -> list[int]:
    """Return the ranks on which a kernel is in one of the given states; by default all states but usable."""
    wanted = states or (_UNAVAILABLE, _FAILED)
    return [rank for rank, row in enumerate(rows) if row[1 + kernel] in wanted]


def _require(asked: KernelName | None, rows: list[list[int]], reasons: Mapping[KernelName, str | None]) -> None:
    if asked is None:
        return
    missing = _ranks(rows, KERNELS.index(asked), _UNAVAILABLE)
    if missing:
        reason = reasons.get(asked) or f"rank {missing[0]} cannot run it, and says why in its own error"
        usable = [
            name for i, name in enumerate(KERNELS) if name in reasons and not _ranks(rows, i, _UNAVAILABLE, _FAILED)
        ]
        raise RunError(
            f"--attention-kernel {asked} ({KERNEL_VARIABLE}) cannot run here: {reason}; use "
            f"--attention-kernel auto{''.join(f' or {name}' for name in usable)}"
        )


def _failed_line(name: KernelName, rows: list[list[int]], reasons: Mapping[KernelName, str | None]) -> str:
    ranks = _ranks(rows, KERNELS.index(name), _FAILED)
    reason = reasons.get(name) or f"rank {ranks[0]}'s test call failed"
    return f"warning: attention kernel {name} is used on no rank: {reason} ({len(ranks)} of {len(rows)} ranks)"


def _lines(preference: Preference, profile: CostProfile) -> list[str]:
    """Return lines with the chosen kernel, the reason for it, and how it differs from the profile's."""
    table, (kernels, origin) = preference.table, default_order(major_capability(), rocm=is_rocm())
    usable = [name for name in kernels if name not in preference.excluded]
    if preference.asked is not None and preference.asked not in preference.excluded:
        fallbacks = ", ".join(name for name in usable if name != preference.asked) or "none"
        main, source = preference.asked, f"{KERNEL_VARIABLE}; calls that it refuses go to {fallbacks}"
    elif table is not None:
        firsts = [next((k for k in table.order(one) if k in usable), "fa2") for one in table.classes()]
        counts = {name: firsts.count(name) for name in KERNELS if name in firsts}
        main = max(counts, key=lambda name: counts[name])
        shares = ", ".join(f"{name} {count}" for name, count in counts.items())
        source = f"measured on {table.device}, torch {table.release}; of {len(firsts)} shapes {shares}"
    else:
        main, *others = usable or ["fa2"]
        source = f"{origin}; not measured: run 'fcp profile' here"
        if main == "cudnn" and others:
            reach = f" from {least_unmeasured_tokens():,} tokens of a sequence and rank on, else {', '.join(others)}"
            return [f"attention kernel cudnn{reach} ({source})", *_assumption(main, profile, shorter=others[0])]
    return [f"attention kernel {main} ({source})", *_assumption(main, profile)]


def _assumption(main: KernelName, profile: CostProfile, *, shorter: KernelName | None = None) -> list[str]:
    """Return lines that name the profile's kernel, with the ratio of times if another kernel runs.

    Args:
        main: kernel of most calls.
        profile: cost profile of the plan.
        shorter: kernel for shorter sequences, if it is not `main`.
    """
    assumed = profile.attention_kernel
    table = profile.attention_kernels
    if table is not None and table.device != torch.cuda.get_device_name():
        there = table.device
        return [f"warning: the profile's kernels were measured on {there}, not on this device; run 'fcp profile' here"]
    if assumed is None:
        return []
    if assumed == main:
        ratio = None if shorter is None else profile.kernel_ratio(shorter, assumed)
        on_shorter = f"; {shorter} takes {ratio:.2f} x as long for attention" if ratio is not None else ""
        return [f"the profile's times are of {assumed}{on_shorter}"]
    ratio = profile.kernel_ratio(main, assumed)
    if ratio is not None and abs(ratio - 1) < _NOTABLE_RATIO - 1:
        return [f"the profile's times are of {assumed}, within 5 % of {main}'s"]
    times = f", and {main} takes {ratio:.2f} x as long for attention" if ratio is not None else ""
    return [f"warning: the profile's times are of {assumed}{times}; run 'fcp profile' here, then 'fcp plan'"]


# Compile the operators of rings before the first step.
#
# Triton compiles an operator when it is first called with some data types and head sizes, for up to a second each time.
# Inside a ring all its members would wait, and with them those of their next rings.

_REHEARSED: Final = tuple(product((2, 3, 4), ((33,), (20, 40, 51))))  # degrees and packs: rows as views, and scattered
_WINDOW: Final = 8

Result = TypeVar("Result")
_Messages: TypeAlias = defaultdict[tuple[int, int], deque[Tensor]]


def compile_ring_operators(metadata: PlanMetadata, device: torch.device, grad_dtype: GradRingDtype) -> None:
    """Run tiny rings on this rank alone, in which it is every member, so that Triton compiles what they call.

    Args:
        metadata: plan, whose cost profile names the model; heads of an unknown model are compiled in its first step.
        device: device of this rank; nothing is done if it has no Triton operators.
        grad_dtype: data type in which rings send gradients.
    """
    model = known_model(parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").model)
    if model is None or not fused_rows(device.type):
        return
    parts = metadata.tensor_parallel
    shapes = {
        (Signature(max(model.num_heads // parts, 1), max(heads.num_kv_heads // parts, 1), heads.head_dim, value_dim,
                   torch.bfloat16), kind.attention == "window")
        for kind in model.kinds
        if kind.attends
        for heads, value_dim in [(model.heads(kind), model.value_dim(kind))]
    }  # fmt: skip
    for (signature, is_window), (degree, lengths) in product(shapes, _REHEARSED):
        with suppress(RunError):  # no kernel takes these heads: the first layer that has them says so
            rehearse_ring(signature, lengths, degree, _WINDOW if is_window else None, device, grad_dtype)


def rehearse_ring(
    signature: Signature,
    lengths: tuple[int, ...],
    degree: int,
    window: int | None,
    device: torch.device,
    grad_dtype: GradRingDtype,
) -> None:
    """Run forward and backward of a ring of zeros, all members in turn on one device."""
    layout, spec = shard_layout(lengths, degree), AttentionSpec(1.0, window)
    messages: _Messages = defaultdict(deque)
    members = [
        Ring(layout, index, tuple(range(degree)), _Loopback(messages, index), grad_dtype) for index in range(degree)
    ]
    heads, kv_heads, head_dim, value_dim, dtype = signature

    def zeros(member: Ring, heads: int, size: int) -> Tensor:
        return torch.zeros(member.tokens, heads, size, dtype=dtype, device=device)

    with torch.no_grad():
        forwards = _in_turn(
            [
                group_forward(
                    one, zeros(one, heads, head_dim), zeros(one, kv_heads, head_dim), zeros(one, kv_heads, value_dim),
                    spec,
                )
                for one in members
            ]
        )  # fmt: skip
        _in_turn(
            [
                group_backward(one, zeros(one, heads, value_dim), kept, spec, kv_heads=kv_heads)
                for one, (_, kept) in zip(members, forwards, strict=True)
            ]
        )


def _in_turn(members: Sequence[Waits[Result]]) -> list[Result]:
    """Run each member of a group up to its next wait, again and again; return their results."""
    results: dict[int, Result] = {}
    handles: dict[int, Handle | None] = dict.fromkeys(range(len(members)))
    while handles:
        for index, handle in list(handles.items()):
            if isinstance(handle, _Arrival):
                if not handle.is_sent():
                    continue
                handle.wait()
            try:
                handles[index] = next(members[index])
            except StopIteration as stop:
                results[index] = stop.value
                del handles[index]
    return [results[index] for index in range(len(members))]


class _Loopback:
    """Transport of one of several members in a process: a message is a copy, to be received in order."""

    def __init__(self, messages: _Messages, index: int) -> None:
        self._messages, self._index = messages, index

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if send is not None:
            self._messages[self._index, to].append(send.clone())
        return _Arrival(self._messages[source, self._index], receive)


class _Arrival:
    def __init__(self, queue: deque[Tensor], receive: Tensor | None) -> None:
        self._queue, self._receive = queue, receive

    def is_sent(self) -> bool:
        return self._receive is None or bool(self._queue)

    def wait(self) -> None:
        if self._receive is not None:
            self._receive.copy_(self._queue.popleft())
