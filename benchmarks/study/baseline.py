"""The papers' own baselines: one degree that holds 128k tokens, "standard packing", the best degree counts.

Megatron-LM's groups are rings; those of DeepSpeed-Ulysses split heads alone, so that their degree divides the heads.

Our solver `static` is a stronger one. It needs to hold no more than the longest sequence that there is, looks at all
sequences of a step before it packs them, and hands out the dearest packs first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.workloads import MAX_LENGTH
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.drafts import members_by_pack
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.util.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardPacking:
    """Packs of up to 128k tokens in order of arrival, dealt to groups of one degree in turns."""

    problem: Problem
    degree: int
    heads_degree: int = 1
    name: str = "standard packing"

    @property
    def options(self) -> Mapping[str, Any]:
        return {"degree": self.degree}

    def assign(self, batch: Batch) -> Assignment:
        """One pack after the other."""
        pack_of = packs_by_arrival(batch.work.tokens)
        packs = int(pack_of[-1]) + 1
        offsets, members = members_by_pack(pack_of, packs)
        wave, group = np.divmod(np.arange(packs), self.problem.num_ranks // self.degree)
        if self.problem.sync == "iteration":
            wave = np.full(packs, -1)
        return Assignment(
            wave=wave.astype(np.int32),
            rank_offsets=np.arange(packs + 1, dtype=np.int64) * self.degree,
            ranks=(group[:, None] * self.degree + np.arange(self.degree)).ravel().astype(np.int32),
            member_offsets=offsets,
            members=members,
            heads_degree=np.full(packs, self.heads_degree, dtype=np.int32) if self.heads_degree > 1 else None,
        )


def packs_by_arrival(tokens: IntArray) -> IntArray:
    """[n] the pack of each sequence: a new one begins where the next sequence no longer fits."""
    pack_of, pack, held = np.empty(len(tokens), dtype=np.int64), 0, 0
    for i, length in enumerate(tokens.tolist()):
        if held + length > MAX_LENGTH:
            pack, held = pack + 1, 0
        pack_of[i] = pack
        held += length
    return pack_of


def best_standard_packing(problem: Problem, batches: Sequence[Batch]) -> StandardPacking | None:
    """The degree that is quickest on these batches; None: no degree that holds 128k tokens divides the heads."""

    def seconds(solver: StandardPacking) -> float:
        return sum(makespan_seconds(solver.assign(batch), batch, problem) for batch in batches)

    return min(_candidates(problem), key=seconds, default=None)


def _candidates(problem: Problem) -> Iterator[StandardPacking]:
    for degree in range(1, problem.num_ranks + 1):
        if problem.num_ranks % degree == 0 and degree * problem.tokens_per_rank >= MAX_LENGTH:
            if problem.attention is None:
                yield StandardPacking(problem=problem, degree=degree)
            elif problem.profile.heads is not None and degree in problem.profile.heads.degrees(degree):
                yield StandardPacking(problem=problem, degree=degree, heads_degree=degree)
