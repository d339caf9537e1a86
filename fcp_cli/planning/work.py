"""The work of sequences and packs on groups, with the padding that the problem's rings need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.model import Work, sequence_work
from fcp_cli.manifest.table import IntArray, LengthTable
from fcp_cli.plan.padding import padded_tokens
from fcp_cli.planning.problem import Problem


def batch_work(sequences: LengthTable, problem: Problem) -> Work:
    """Work of each sequence on a single rank, padded for that. No group pads less, so bounds may count with it."""
    if problem.padding_multiple is None:
        return sequence_work(sequences, problem.profile)
    padded = padded_tokens(sequences.length_tokens, 1, problem.padding_multiple)
    return sequence_work(replace(sequences, length_tokens=padded), problem.profile)


def work_on(work: Work, degree: npt.ArrayLike, problem: Problem) -> Work:
    """The same sequences padded for groups of `degree` ranks; the arguments broadcast. Still before division by it."""
    if problem.padding_multiple is None:
        return work
    tokens = padded_tokens(work.tokens, degree, problem.padding_multiple)
    growth = tokens / work.tokens
    added = problem.profile.coefficients.linear_seconds_per_token * (tokens - work.tokens)
    return Work(
        attention_seconds=work.attention_seconds * growth * growth,
        linear_seconds=work.linear_seconds + added,
        tokens=tokens,
    )


def pack_work(work: Work, members: IntArray, offsets: IntArray, degree: npt.ArrayLike, problem: Problem) -> Work:
    """Work of packs on groups.

    Args:
        work: of the batch's sequences.
        members: of all packs, back to back: pack p has `members[offsets[p]:offsets[p + 1]]`, at least one.
        offsets: [packs + 1].
        degree: of the packs' groups: [packs], or one for all.
        problem: says how rings are padded.
    """
    first = offsets[:-1]
    of_members = work.take(members)
    if problem.padding_multiple is not None:
        degrees = np.broadcast_to(np.asarray(degree), first.shape)
        of_members = work_on(of_members, np.repeat(degrees, np.diff(offsets)), problem)
    return Work(
        attention_seconds=np.add.reduceat(of_members.attention_seconds, first),
        linear_seconds=np.add.reduceat(of_members.linear_seconds, first),
        tokens=np.add.reduceat(of_members.tokens, first),
    )


def pack_tokens(work: Work, members: IntArray, offsets: IntArray, degrees: IntArray, problem: Problem) -> IntArray:
    """[packs] tokens that each group holds, with padding; arguments as for `pack_work`."""
    tokens = work.tokens[members]
    if problem.padding_multiple is not None:
        tokens = padded_tokens(tokens, np.repeat(degrees, np.diff(offsets)), problem.padding_multiple)
    return np.asarray(np.add.reduceat(tokens, offsets[:-1]))
