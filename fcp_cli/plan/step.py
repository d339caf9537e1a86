"""One planned step as flat arrays, the form that solvers, the plan file and the runtime share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray


def offsets_of(sizes: npt.ArrayLike) -> IntArray:
    """Return [lists + 1] the offsets of concatenated lists of these sizes."""
    sizes = np.asarray(sizes, dtype=np.int64)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def sizes_of(offsets: IntArray) -> IntArray:
    """Return [lists] the sizes of concatenated lists; the inverse of `offsets_of`."""
    return offsets[1:] - offsets[:-1]  # called many times per step: the overhead of np.diff exceeds the subtraction


def level_waves(groups: Iterable[Collection[int]]) -> list[int]:
    """Return the wave of each group: the earliest one after the waves of the previous groups of all its ranks."""
    next_wave: dict[int, int] = {}
    waves = []
    for ranks in groups:
        wave = max(next_wave.get(rank, 0) for rank in ranks)
        next_wave.update(dict.fromkeys(ranks, wave + 1))
        waves.append(wave)
    return waves


class RingGroup(NamedTuple):
    """A group of degree > 1 in a compact, hashable form.

    Attributes:
        packed_ranks: bytes of its ascending int32 ranks.
        heads_degree: Ulysses degree.
    """

    packed_ranks: bytes
    heads_degree: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.packed_ranks, dtype=np.int32).tolist())

    @property
    def degree(self) -> int:
        return len(self.packed_ranks) // np.dtype(np.int32).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One row of a plan: a pack of sequences on a group of ranks. An idle row has no sequences and takes no time.

    Attributes:
        step, order: optimizer step, and position in the global order of the step.
        wave: wave number under `sync: microbatch`, -1 under `iteration`.
        ranks: global ranks, ascending in a plan; their number is the degree.
        sequences: manifest row numbers.
        lengths: tokens of each sequence.
        start_seconds, seconds: predicted, from the start of the step.
        heads_degree: Ulysses degree u of the degree u x r: r groups of u consecutive ranks form the ring.
    """

    step: int
    order: int
    wave: int
    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    start_seconds: float
    seconds: float
    heads_degree: int = 1

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def ring_degree(self) -> int:
        """Ring degree r of the degree u x r."""
        return self.degree // self.heads_degree

    @property
    def described_degree(self) -> str:
        """Degree as text, with u x r if the group splits heads."""
        return (
            f"{self.degree}" if self.heads_degree == 1 else f"{self.degree} = {self.heads_degree} x {self.ring_degree}"
        )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_idle(self) -> bool:
        return not self.sequences


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All micro-batches of one step, in the step's global order.

    Micro-batch i runs `sequences[sequence_offsets[i]:sequence_offsets[i + 1]]` on
    `ranks[rank_offsets[i]:rank_offsets[i + 1]]`. Flat arrays keep 16,384 ranks and 65,536 sequences cheap.
    """

    step: int
    wave: Int32Array  # [microbatches]
    rank_offsets: IntArray  # [microbatches + 1]
    ranks: Int32Array
    sequence_offsets: IntArray  # [microbatches + 1]
    sequences: IntArray
    lengths: Int32Array
    start_seconds: FloatArray  # [microbatches]
    seconds: FloatArray  # [microbatches]
    makespan_seconds: float
    bound_seconds: float
    heads_degree: Int32Array | None = None  # [microbatches]; None: 1 everywhere

    def __len__(self) -> int:
        return len(self.wave)

    @cached_property
    def degrees(self) -> IntArray:
        """[microbatches] number of ranks of each group."""
        return sizes_of(self.rank_offsets)

    @cached_property
    def is_idle(self) -> npt.NDArray[np.bool_]:
        """[microbatches] whether a row has no sequences."""
        return np.asarray(self.sequence_offsets[1:] == self.sequence_offsets[:-1])

    @cached_property
    def tokens(self) -> IntArray:
        """[microbatches] tokens per pack; 0 for an idle row."""
        return sizes_of(offsets_of(self.lengths)[self.sequence_offsets])

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1."""
        return self.makespan_seconds / self.bound_seconds - 1.0

    def busy_seconds(self, num_ranks: int) -> FloatArray:
        """Return [num_ranks] the predicted compute seconds of each rank."""
        busy = np.zeros(num_ranks)
        np.add.at(busy, self.ranks, np.repeat(self.seconds, self.degrees))
        return busy

    def idle_fraction(self, num_ranks: int) -> float:
        """Return the idle share of the step's rank-seconds."""
        return 1.0 - float(self.busy_seconds(num_ranks).sum()) / (num_ranks * self.makespan_seconds)

    def microbatch(self, i: int) -> MicroBatch:
        """Return row i as an object."""
        members = slice(self.sequence_offsets[i], self.sequence_offsets[i + 1])
        return MicroBatch(
            step=self.step,
            order=i,
            wave=int(self.wave[i]),
            ranks=tuple(self.ranks[self.rank_offsets[i] : self.rank_offsets[i + 1]].tolist()),
            sequences=tuple(self.sequences[members].tolist()),
            lengths=tuple(self.lengths[members].tolist()),
            start_seconds=float(self.start_seconds[i]),
            seconds=float(self.seconds[i]),
            heads_degree=1 if self.heads_degree is None else int(self.heads_degree[i]),
        )

    def packs_of(self, rank: int) -> list[list[int]]:
        """Return the sequences of each micro-batch of a rank, in execution order."""
        rows = np.repeat(np.arange(len(self)), self.degrees)[self.ranks == rank].tolist()
        return [self.sequences[self.sequence_offsets[i] : self.sequence_offsets[i + 1]].tolist() for i in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the step as JSON values; rows of a plan file come from `plan.file.schema.steps_to_arrow`."""
        return {
            "step": self.step,
            "makespan_seconds": self.makespan_seconds,
            "bound_seconds": self.bound_seconds,
            "microbatches": [asdict(microbatch) for microbatch in self.microbatches()],
        }

    def ring_groups(self) -> Iterator[RingGroup]:
        """Yield the groups of degree > 1, for which a back end with one communicator per ring needs process groups."""
        for i in np.flatnonzero(self.degrees > 1):
            ranks = self.ranks[self.rank_offsets[i] : self.rank_offsets[i + 1]].tobytes()
            yield RingGroup(ranks, 1 if self.heads_degree is None else int(self.heads_degree[i]))

    def microbatches(self) -> Iterator[MicroBatch]:
        """Yield the rows as objects; too slow for inner loops."""
        return (self.microbatch(i) for i in range(len(self)))
