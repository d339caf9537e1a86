"""Verify that all ranks start at the same step, and that the ranks of a ring got the same data.

Both are compared between hosts, in parallel with device work: one number per step is all-reduced, started before the
step's first micro-batch and read after its last, so that no rank waits for it. Only if it differs from zero do ranks
exchange details, to name the difference.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import torch
from torch import Tensor

from fcp_cli.cost.kernels import LEAST_UNMEASURED_TOKENS, KernelTable, default_order
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.cost.recipe import KERNEL_VARIABLE, KERNELS, KernelName
from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.kernels import prefer
from fcp_cli.runtime.kernels.available import is_rocm, major_capability, unavailability
from fcp_cli.runtime.kernels.select import GENERIC, Preference, Signature, asked_kernel, unusable
from fcp_cli.runtime.transport import Waitable, World, gather_rows, gather_words

_WORD = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PackDigest:
    """One rank's input for one pack that it shares with others.

    Attributes:
        order: index of the micro-batch in the step.
        member, degree: this rank's index in the ring, and the ring's degree.
        rows: rows of the data.
        digests: int64 digest of each row's tokens and labels.
    """

    order: int
    member: int
    degree: int
    rows: Sequence[int]
    digests: Sequence[int]

    @property
    def share(self) -> int:
        """Return this member's 64-bit summand: a ring's summands add up to 0 modulo 2^64 if all digests are equal."""
        content = ",".join(map(str, (self.order, *self.digests))).encode()
        own = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        return (own * (self.degree - 1) if self.member == 0 else -own) % _WORD


def digest(tensors: Iterable[Tensor]) -> int:
    """Return an int64 digest of the content of tensors in host memory."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hashed.update(tensor.numpy().tobytes())
    return _signed(int.from_bytes(hashed.digest(), "little"))


def agree_on_first_step(world: World, first_step: int) -> None:
    """Raise RunError unless all ranks start at the same step. Every rank calls it."""
    steps = [begun - 1 for (begun,) in gather_words(world, (first_step + 1,))]
    others = [rank for rank, step in enumerate(steps) if step not in (-1, steps[0])]
    if others:
        raise RunError(
            f"rank {others[0]} begins with step {steps[others[0]]}, rank 0 with step {steps[0]}"
            f"{f' ({len(others)} ranks differ from it)' if len(others) > 1 else ''}: they were resumed from different "
            "checkpoints; load the same one on every rank, and pass its step as first_step"
        )


class SameData:
    """Data check of one step: started on construction, read by `require`. Every rank does both, in the same order."""

    def __init__(self, world: World, step: int, packs: Sequence[PackDigest]) -> None:
        self._world, self._step, self._packs = world, step, packs
        self._sum = torch.tensor(_signed(sum(pack.share for pack in packs) % _WORD), dtype=torch.int64, device="cpu")
        self._handle: Waitable = world.start_sum(self._sum)

    def require(self) -> None:
        """Raise RunError, on every rank, if ranks of a ring got different data."""
        self._handle.wait()
        if self._sum.item():
            raise RunError(self._difference())

    def _difference(self) -> str:
        own = [
            (pack.order, row, value) for pack in self._packs for row, value in zip(pack.rows, pack.digests, strict=True)
        ]
        first: dict[tuple[int, int], tuple[int, int]] = {}
        told = gather_rows(self._world, torch.tensor(own, dtype=torch.int64, device="cpu").reshape(-1, 3))
        for rank, (order, row, value) in ((rank, one) for rank, each in enumerate(told) for one in each.tolist()):
            other, known = first.setdefault((order, row), (rank, value))
            if known != value:
                return (
                    f"step {self._step}, micro-batch {order}: fetch gave rank {rank} other tokens or labels for row "
                    f"{row} of the data than rank {other}, and both train on parts of it; make fetch a function of the "
                    "row alone (draw a random mask from a generator that is seeded with it)"
                )
        return f"step {self._step}: ranks of a ring were given different data"


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word


def agree_on_bad_rows(world: World, device: torch.device, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sorted union of all ranks' manifest rows; the same on all ranks. Every rank calls it.

    Args:
        world: all ranks of the job.
        device: device of the collectives.
        own: manifest rows that failed to decode on this rank.
    """
    told = gather_rows(world, torch.tensor(own, dtype=torch.int64, device=device), device)
    return tuple(sorted({row for rows in told for row in rows.tolist()}))


# Agree, before the first step, on the CUDA attention kernels that every rank can run, and print the choice.

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
            reach = f" from {LEAST_UNMEASURED_TOKENS:,} tokens of a sequence and rank on, else {', '.join(others)}"
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


# Data type in which gradients of keys and values travel around rings; the same on all ranks.

GRAD_RING_VARIABLE = "FCP_GRAD_RING_DTYPE"


def agreed_grad_dtype(world: World, device: torch.device, given: GradRingDtype | None = None) -> GradRingDtype:
    """Return the argument, else FCP_GRAD_RING_DTYPE, else fp32. Collective: every rank calls it.

    Args:
        world: all processes.
        device: device of the collectives' tensors.
        given: value from the script; the same on every rank.
    """
    from fcp_cli.runtime.transport import gather_words

    choices = get_args(GradRingDtype)
    wanted = given or os.environ.get(GRAD_RING_VARIABLE) or choices[0]
    own = choices.index(wanted) if wanted in choices else len(choices)
    per_rank = [choice for (choice,) in gather_words(world, (own,), device)]
    if wanted not in choices:
        raise RunError(f"{GRAD_RING_VARIABLE} is {wanted!r}; it must be one of {', '.join(choices)}")
    for rank, choice in enumerate(per_rank):
        if choice != per_rank[0]:
            raise RunError(
                f"gradients travel in {choices[per_rank[0]]} on rank 0, but rank {rank} has another "
                f"{GRAD_RING_VARIABLE}; set it alike on all nodes"
            )
    agreed: GradRingDtype = choices[per_rank[0]]
    return agreed
