"""Work of sequences and packs under a problem's profile, including the padding of rings."""

from __future__ import annotations

import numpy.typing as npt

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import Work, vision_seconds
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.pricing import packs as pricing
from fcp_cli.plan.pricing.padded_work import padded_work
from fcp_cli.planning.problem import Problem


def batch_work(sequences: LengthTable, problem: Problem) -> Work:
    """Return [sequences] the work of each sequence on a single rank, padded for one rank.

    If all ranks of a wave share the encoder's work (`batch_encoder_seconds`), it is not included.
    """
    if problem.encoder_balance is not None:
        sequences = pricing.without_pictures(sequences)
    return pricing.single_rank_work(sequences, problem.profile, problem.padding_multiple)


def batch_encoder_seconds(sequences: LengthTable, problem: Problem) -> FloatArray | None:
    """Return [n] the single-rank encoder seconds of each sequence if a wave's ranks share them, else None."""
    return None if problem.encoder_balance is None else vision_seconds(sequences, problem.profile)


def work_on(work: Work, degree: npt.ArrayLike, problem: Problem) -> Work:
    """Return the work of sequences padded for groups of `degree` ranks, not divided by it; the arguments broadcast."""
    return padded_work(work, degree, problem.padding_multiple, problem.profile)


def pack_work(work: Work, members: IntArray, offsets: IntArray, degree: npt.ArrayLike, problem: Problem) -> Work:
    """Return [packs] the total work of packs, padded for their groups.

    Args:
        work: the work of the batch's sequences.
        members: members of all packs, back to back: pack p has `members[offsets[p]:offsets[p + 1]]`, at least one.
        offsets: [packs + 1].
        degree: degree of the packs' groups: [packs], or one for all.
        problem: the problem, for the padding of rings.
    """
    return pricing.pack_work(work.take(members), offsets, degree, problem.profile, problem.padding_multiple)
