"""Replacements for verl's two functions that balance sequences, using the prices of a cost profile.

    balancing = VerlBalancing(planner)
    seqlen_balancing.get_seqlen_balanced_partitions = balancing.get_seqlen_balanced_partitions
    seqlen_balancing.rearrange_micro_batches = balancing.rearrange_micro_batches

Patch them before importing verl's trainer and workers, which import the functions by name. Signatures as in verl 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fcp_cli.cost.model import sequence_work
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.planning.planner import Planner
from fcp_cli.planning.rollouts.levelling import fewest_packs, level_packs, level_parts, slowest_first
from fcp_cli.util.arrays import FloatArray, IntArray

_WORK_PER_TOKEN = 24576  # verl's workload of L tokens is 24576 L + L^2, from a 7B model


class VerlBalancing:
    """Drop-in replacements for verl's functions of the same names.

    Args:
        planner: source of prices; use one with `phase="forward"` for log-probabilities.
        select: function that returns the given positions of a batch; None: verl's own.
    """

    def __init__(self, planner: Planner, *, select: Callable[[Any, list[int]], Any] | None = None) -> None:
        self._profile = planner.problem.profile
        self._select = select

    def get_seqlen_balanced_partitions(
        self, seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
    ) -> list[list[int]]:
        """Return the positions of the sequences in each part, ascending.

        Args:
            seqlen_list: workloads that verl's trainers compute from lengths.
            k_partitions: number of parts, the data-parallel size.
            equal_size: whether all parts get equally many sequences.

        Raises:
            UsageError: there are fewer sequences than parts, parts cannot be equal, or a value is not a verl workload.
        """
        count = len(seqlen_list)
        if count < k_partitions:
            raise UsageError(
                f"{count} sequences cannot be spread over {k_partitions} parts; give one for each at least"
            )
        if equal_size and count % k_partitions:
            raise UsageError(f"{count} sequences are no multiple of the {k_partitions} parts, which need equal numbers")
        seconds = self._seconds(lengths_of_workloads(seqlen_list))
        return [sorted(part) for part in level_parts(seconds, k_partitions, equal_counts=equal_size)]

    def rearrange_micro_batches(
        self,
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        **grouping: int,
    ) -> tuple[list[Any], list[list[int]]]:
        """Return a rank's micro-batches, and the positions of each one's sequences.

        Args:
            batch: batch with `input_ids`, nested or with an `attention_mask`.
            max_token_len: token limit of a micro-batch.
            dp_group: process group whose ranks run equally many micro-batches, if `same_micro_num_in_dp`.
            num_batches_divided_by: required divisor of the number of micro-batches.
            same_micro_num_in_dp: see `dp_group`.
            min_num_micro_batch: least number of micro-batches.
            use_dynamic_bsz_balance: whether to put the fastest at both ends, which suits pipelines.
            grouping: `force_group_size`: number of consecutive sequences that stay together.

        Raises:
            UsageError: on all ranks of the group if a sequence (or group of them) has too many tokens, or if there are
                too few for the micro-batches; on this rank alone if arguments or group size do not fit.
        """
        ids = batch["input_ids"]
        found = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
        lengths = np.asarray(found.cpu().numpy(), dtype=np.int64)
        size = grouping.pop("force_group_size", 1)
        if grouping:
            raise UsageError(f"rearrange_micro_batches does not support {min(grouping)}; it takes verl 0.9's arguments")
        if len(lengths) % size:
            raise UsageError(f"{len(lengths)} sequences are no multiple of force_group_size {size}")
        tokens = lengths.reshape(-1, size).sum(axis=1)
        seconds = self._seconds(lengths).reshape(-1, size).sum(axis=1)
        agreed = _agreement(dp_group if same_micro_num_in_dp else None)
        longest = agreed(int(tokens.max()))
        if longest > max_token_len:
            raise UsageError(f"a sequence has {longest} tokens; a micro-batch holds {max_token_len} (max_token_len)")
        fewest = -agreed(-len(tokens))
        multiple = num_batches_divided_by or 1
        count = agreed(max(fewest_packs(tokens, max_token_len), min_num_micro_batch or 1))
        while True:
            count = -(-count // multiple) * multiple
            if count > fewest:
                raise UsageError(f"{count} micro-batches are needed, but a rank has {fewest} sequences for them")
            packs = level_packs(seconds, tokens, count, max_token_len)
            if not agreed(int(packs is None)):
                break
            count += 1
        assert packs is not None
        ordered = slowest_first(packs, seconds)
        if use_dynamic_bsz_balance:
            ordered = ordered[::2][::-1] + ordered[1::2]
        whole = [[at * size + one for at in pack for one in range(size)] for pack in ordered]
        select = self._select or _verl_select()
        return [select(batch, positions) for positions in whole], whole

    def _seconds(self, lengths: IntArray) -> FloatArray:
        return sequence_work(LengthTable(name="the batch", length_tokens=lengths), self._profile).total_seconds


def lengths_of_workloads(workloads: Sequence[float]) -> IntArray:
    """Return the lengths L of sequences from verl's workloads 24576 L + L^2.

    Raises:
        UsageError: a value is not the workload of a whole number of tokens.
    """
    given = np.array([float(one) for one in workloads])
    half = _WORK_PER_TOKEN / 2
    lengths = np.rint(np.sqrt(half * half + given) - half)
    # Trainers may pass values rounded to fp32.
    wrong = np.flatnonzero((lengths < 1) | (np.abs(lengths * (lengths + _WORK_PER_TOKEN) - given) > 1e-6 * given))
    if len(wrong):
        raise UsageError(
            f"item {wrong[0]} is {given[wrong[0]]:g}, which is 24576 L + L^2 of no length L; pass what verl's "
            "calculate_workload returns"
        )
    return lengths.astype(np.int64)


def _agreement(group: Any) -> Callable[[int], int]:
    """Return a collective function that computes the maximum of a number over a process group."""
    import torch
    import torch.distributed as dist

    if group is None or not dist.is_initialized():
        return lambda value: value
    device = torch.accelerator.current_accelerator() if dist.get_backend(group) != "gloo" else None

    def largest(value: int) -> int:
        told = torch.tensor([value], device=device or "cpu")
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return int(told.item())

    return largest


def _verl_select() -> Callable[[Any, list[int]], Any]:
    from verl.utils.tensordict_utils import index_select_tensor_dict  # type: ignore[import-not-found, unused-ignore]

    return index_select_tensor_dict  # type: ignore[no-any-return, unused-ignore]
