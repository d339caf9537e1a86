"""What the micro-batches of a planned step cost under a cost profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcp_cli.cost.model import group_seconds, sequence_work
from fcp_cli.cost.profile import CostProfile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.padding import held_tokens, padded_lengths
from fcp_cli.plan.step import FloatArray, Int32Array, Int64Array, StepPlan


def profile_seconds(
    step: StepPlan,
    *,
    profile: CostProfile,
    ranks_per_node: int,
    padding_multiple: int | None = None,
    manifest: LengthTable | None = None,
) -> FloatArray:
    """[microbatches] seconds of each micro-batch under a cost profile; 0 for an idle row.

    Args:
        step: the planned step; lengths are its own, after truncation.
        profile: any cost profile, the plan's own or another.
        ranks_per_node: which ranks share the fast interconnect.
        padding_multiple: of the plan; see `padding`.
        manifest: gives `eta` and vision columns; without it every sequence counts as causal text.
    """
    sequences = planned_sequences(step, manifest)
    if padding_multiple is not None:
        sequences = replace(sequences, length_tokens=padded_lengths(step, padding_multiple))
    work = sequence_work(sequences, profile)
    idle = step.tokens == 0
    seconds = group_seconds(
        profile,
        attention_seconds=_per_microbatch(work.attention_seconds, step.sequence_offsets),
        linear_seconds=_per_microbatch(work.linear_seconds, step.sequence_offsets),
        tokens=held_tokens(step, padding_multiple),
        degree=step.degrees,
        crosses_nodes=crosses_nodes(step.rank_offsets, step.ranks, ranks_per_node),
    )
    return np.where(idle, 0.0, seconds)


def planned_sequences(step: StepPlan, manifest: LengthTable | None) -> LengthTable:
    """The sequences of a step in its own order, with its own lengths; factors of cost from the manifest, if any."""
    lengths = step.lengths.astype(np.int64)
    if manifest is None:
        return LengthTable(name="", length_tokens=lengths)
    rows = manifest.take(step.sequences)
    return LengthTable(
        name=manifest.name,
        length_tokens=lengths,
        eta=rows.eta,
        vision_patches=rows.vision_patches,
        vision_patch_pairs=rows.vision_patch_pairs,
    )


def _per_microbatch(values: FloatArray, offsets: Int64Array) -> FloatArray:
    """Sum `values` per micro-batch; empty packs give 0 (which `np.add.reduceat` alone does not)."""
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.bincount(owner, weights=values, minlength=len(offsets) - 1).astype(np.float64)


def crosses_nodes(
    rank_offsets: Int64Array, ranks: Int32Array, ranks_per_node: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[groups] whether each group's ranks lie on more than one node; ranks ascend within a group."""
    return np.asarray(
        ranks[rank_offsets[:-1]] // ranks_per_node != ranks[rank_offsets[1:] - 1] // ranks_per_node, dtype=np.bool_
    )
