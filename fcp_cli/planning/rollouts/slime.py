"""Replacement for slime's split of rollouts over data-parallel ranks, balanced by the prices of a cost profile.

`build_dp_schedule` has the signature of `slime.utils.dp_schedule.build_dp_schedule`. Every rank runs equally many
micro-batches per step, none of them empty; a virtual pipeline needs a multiple of its group size.

    from functools import partial
    schedule = partial(build_dp_schedule, planner)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fcp_cli.cost.model import sequence_work
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.planning.planner import Planner
from fcp_cli.planning.rollouts.levelling import fewest_packs, level_packs, level_parts, slowest_first
from fcp_cli.util.arrays import FloatArray, IntArray


def build_dp_schedule(
    planner: Planner,
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    sample_is_multimodal: Sequence[bool] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Return the schedule of all steps, in slime's format.

    Args:
        planner: source of prices; use one with `phase="forward"` for log-probabilities.
        args: slime's arguments: `max_tokens_per_gpu`, and `use_dynamic_batch_size`, which must be on.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size` and `microbatch_group_size_per_vp_stage`.
        total_lengths: tokens of each sample.
        global_batch_size: rollouts per step; a partial last step is dropped.
        rollout_indices: rollout of each sample; samples of a rollout share a step.
        sample_is_multimodal: whether each sample is multimodal; None: none is.

    Returns:
        (samples of each rank, its micro-batches as positions among them, number of micro-batches per rank of each step,
        number of rollouts of each step).

    Raises:
        UsageError: a setting is unsupported, or there are too few rollouts for a step or samples for its micro-batches.
    """
    _require_known(args, sample_is_multimodal)
    ranks = train_parallel_config["dp_size"]
    margin = float(getattr(args, "packing_safety_margin", 1.0))
    most_tokens = max(1, int(args.max_tokens_per_gpu * train_parallel_config["cp_size"] * margin))
    grouped = train_parallel_config["vpp_size"] > 1
    multiple = train_parallel_config["microbatch_group_size_per_vp_stage"] if grouped else 1
    lengths = np.asarray(total_lengths, dtype=np.int64)
    seconds = sequence_work(LengthTable(name="", length_tokens=lengths), planner.problem.profile).total_seconds
    samples_of: list[list[int]] = [[] for _ in range(ranks)]
    packs_of: list[list[list[int]]] = [[] for _ in range(ranks)]
    numbers = []
    steps = _steps(rollout_indices, global_batch_size)
    for step, samples in enumerate(steps):
        here = np.array(samples, dtype=np.int64)
        split = _split(seconds[here], lengths[here], ranks, multiple, most_tokens)
        if split is None:
            raise UsageError(
                f"step {step} has {len(here)} samples, too few for equally many micro-batches on {ranks} ranks"
            )
        numbers.append(len(split[0]))
        for rank, packs in enumerate(split):
            for pack in packs:
                first = len(samples_of[rank])
                samples_of[rank] += here[pack].tolist()
                packs_of[rank].append(list(range(first, first + len(pack))))
    return samples_of, packs_of, numbers, [global_batch_size] * len(steps)


def _require_known(args: Any, sample_is_multimodal: Sequence[bool] | None) -> None:
    if not args.use_dynamic_batch_size or args.max_tokens_per_gpu is None:
        raise UsageError("micro-batches of a fixed size leave nothing to plan; add --use-dynamic-batch-size")
    if getattr(args, "global_batch_tokens", None) is not None:
        raise UsageError("steps by tokens are not known here; remove global_batch_tokens")
    separates = getattr(args, "multimodal_aware_packing", "off") != "off"
    if separates and sample_is_multimodal is not None and any(sample_is_multimodal):
        raise UsageError("packing that separates images from text is unsupported; set multimodal_aware_packing to off")


def _steps(rollout_indices: Sequence[int], global_batch_size: int) -> list[list[int]]:
    samples: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples.setdefault(rollout, []).append(sample)
    rollouts = list(samples.values())
    if len(rollouts) < global_batch_size:
        raise UsageError(f"{len(rollouts)} rollouts make no step of {global_batch_size}; lower global_batch_size")
    starts = range(0, len(rollouts) - global_batch_size + 1, global_batch_size)
    return [[one for of in rollouts[start : start + global_batch_size] for one in of] for start in starts]


def _split(
    seconds: FloatArray, lengths: IntArray, ranks: int, multiple: int, most_tokens: int
) -> list[list[list[int]]] | None:
    """Return equally many packs for each rank, or None if there are too few sequences.

    Packs each rank's share of the sequences, or if that fails, distributes packs of all sequences over the ranks.
    """
    cap = np.minimum(lengths, most_tokens)  # longer sequences are packs by themselves
    number = -(-fewest_packs(cap, most_tokens) // (ranks * multiple)) * multiple
    while number * ranks <= len(lengths):
        shares = [np.array(part, dtype=np.int64) for part in level_parts(seconds, ranks)]
        packs = [_packs(seconds, cap, share, number, most_tokens) for share in shares]
        if all(one is not None for one in packs):
            return [one for one in packs if one is not None]
        whole = level_packs(seconds, cap, number * ranks, most_tokens)
        if whole is not None:
            weights = np.array([seconds[pack].sum() for pack in whole])
            parts = level_parts(weights, ranks, equal_counts=True)
            return [slowest_first([whole[at] for at in part], seconds) for part in parts]
        number += multiple
    return None


def _packs(
    seconds: FloatArray, tokens: IntArray, share: IntArray, number: int, most_tokens: int
) -> list[list[int]] | None:
    if len(share) < number:
        return None
    found = level_packs(seconds[share], tokens[share], number, most_tokens)
    return None if found is None else slowest_first([share[pack].tolist() for pack in found], seconds)
