"""What all ranks must agree on besides the plan: first step, data, skipped rows, type of gradients.

The data of a ring is compared between hosts, in parallel with device work: one number per step is all-reduced, started
before the step's first micro-batch and read after its last, so that no rank waits for it. Only if it differs from zero
do ranks exchange details, to name the difference.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.choices import GradRingDtype
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


# Data type in which gradients of keys and values travel around rings; the same on all ranks.

GRAD_RING_VARIABLE = "FCP_GRAD_RING_DTYPE"


def agreed_grad_dtype(world: World, device: torch.device, given: GradRingDtype | None = None) -> GradRingDtype:
    """Return the argument, else FCP_GRAD_RING_DTYPE, else fp32. Collective: every rank calls it.

    Args:
        world: all processes.
        device: device of the collectives' tensors.
        given: value from the script; the same on every rank.
    """
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
