"""Transformer Engine's own ring attention under a plan.

Its rings need process groups, so each group of the plan gets one, created once, in the same order on all processes. It
splits sequences into equal chunks, so they are padded to a multiple of 2 x degree. The group is set per call and reset
after it; backward and recomputation keep the call's arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import refuse
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.transport import ProcessTransport, rank_timeout

MOST_GROUPS = 64
"""That a process may be in, if the free memory of its device is not known."""

# Measured on A100s: 544 MB per communicator of two ranks, 688 MB if larger (NVIDIA/nccl issue 964).
_COMMUNICATOR_BYTES = 688 << 20
_COMMUNICATORS_SHARE = 0.5  # share of the memory that is free before the first step; activations need the rest

_VARIABLE = "FCP_ATTENTION"
_ENGINE, _OWN = "transformer-engine", "ring"
_CORE = "TEDotProductAttention"
_PEER_TO_PEER = "p2p"
_BATCHED = "NVTE_BATCH_MHA_P2P_COMM"  # read in every call of Transformer Engine's rings


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanProcessGroups:
    """Process groups of a plan, from the view of one process.

    Attributes:
        groups: process groups of which it is a member, by their global ranks in ring order.
        count: number of the plan's groups of degree > 1.
        device: device of the process.
    """

    groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    count: int
    device: torch.device

    def __str__(self) -> str:
        return f"Transformer Engine ({self.count} process groups)"

    def sequences(self, ranks: tuple[int, ...], lengths: Sequence[int]) -> PackedSeqParams:
        """Return Megatron's PackedSeqParams for a pack on a ring.

        Args:
            ranks: global ranks in ring order.
            lengths: tokens of each sequence, with padding.
        """
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu").to(
            self.device, non_blocking=True
        )
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            # Without a group, a local size of 1 means that this call has no ring.
            local_cp_size=len(ranks),
            cp_group=self.groups[ranks] if len(ranks) > 1 else None,
        )


def wants_rings(
    models: Iterable[nn.Module], *, shares_heads: bool = False, is_latent: bool = False, has_masks: bool = False
) -> bool:
    """Return whether to use Transformer Engine's rings: if the model has them, unless FCP_ATTENTION=ring.

    Collective, since a pipeline stage may have no attention layers.

    Args:
        models: models with the attention layers.
        shares_heads: whether the plan has groups with a Ulysses degree, which need fcp's own attention.
        is_latent: whether value heads differ in size from key heads (MLA), which needs fcp's own attention.
        has_masks: whether the plan has attention masks, which need fcp's own attention unless
            FCP_ATTENTION=transformer-engine asserts that they are packs of causal sequences.
    """
    wanted = os.environ.get(_VARIABLE) or None
    if wanted not in (None, _ENGINE, _OWN):
        raise RunError(f"{_VARIABLE} is {wanted}; it must be {_ENGINE} or {_OWN}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bool(_cores(models)))
    has_engine = any(found)
    reasons = (
        (
            not has_engine,
            "the model does not attend with it; unset it, or build the model with --transformer-impl "
            "transformer_engine",
        ),
        (
            shares_heads,
            "the plan has groups whose ranks share heads, which run on fcp's own attention; unset it, or plan with "
            "'fcp plan --attention ring'",
        ),
        (is_latent, "the model has multi-latent attention (MLA), which runs on fcp's own ring; unset it"),
    )
    refuse((wanted == _ENGINE and is_refused, f"{_VARIABLE} is {_ENGINE}, but {why}") for is_refused, why in reasons)
    needs_own = shares_heads or is_latent or (has_masks and wanted != _ENGINE)
    return has_engine and wanted != _OWN and not needs_own


def make_rings(
    models: Iterable[nn.Module], plan: Path, peers: Sequence[int], device: torch.device
) -> PlanProcessGroups:
    """Create and warm up the process groups of a plan. Collective; called once on all processes.

    `new_group(use_local_synchronization=True)` would deadlock, since groups overlap.

    Args:
        models: models whose attention modules are set up for rings.
        plan: plan file.
        peers: global rank, for each rank of the plan, of the process with the same part of the model as this one.
        device: device of this process.
    """
    rows = (row for step in PlanReader(plan).steps() for row in step.microbatches())
    # Sorted, since new_group is collective and hangs if the order differs between processes.
    planned = sorted({row.ranks for row in rows if row.degree > 1}, key=lambda ranks: (len(ranks), ranks))
    _check_memory(plan, sum(peers.index(dist.get_rank()) in ranks for ranks in planned), device)
    for core in _cores(models):
        core.cp_comm_type = _PEER_TO_PEER
        if type(core).cp_stream is None:  # Megatron creates it only for a static group
            type(core).cp_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # Single sends, its default, would make a communicator per pair of ranks within the first step.
    os.environ.setdefault(_BATCHED, "1")
    groups = {}
    for members in _members(planned, peers):
        group = dist.new_group(list(members), timeout=rank_timeout(device))
        if dist.get_rank() in members and group is not None:
            # NCCL creates communicators at first use; within a step, that would stall members of other rings.
            ProcessTransport(group, device).warm_up(device)
            groups[members] = group
    return PlanProcessGroups(groups=groups, count=len(planned), device=device)


def most_groups(device: torch.device) -> int:
    """Return the maximum number of process groups: communicators may take half of the free device memory, if known."""
    if device.type != "cuda":
        return MOST_GROUPS
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(_COMMUNICATORS_SHARE * free_bytes / _COMMUNICATOR_BYTES)


def attend(core: Any, run: Callable[..., Tensor], arguments: Mapping[str, Any]) -> Tensor:
    """Run Megatron's core attention on packed tokens, and reset its group; return [tokens, 1, heads * head_dim].

    Args:
        core: core attention module, which keeps the last group that it was given.
        run: its forward, with queries, keys and values bound.
        arguments: keyword arguments, including the PackedSeqParams.
    """
    try:
        return run(**arguments).unsqueeze(1)
    finally:
        core.set_context_parallel_group(None, None, None, _PEER_TO_PEER)


def _check_memory(plan: Path, groups: int, device: torch.device) -> None:
    """Raise RunError on all processes if one is a member of more groups than its device memory allows."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups, most_groups(device)))
    # Report the process with the largest excess, so that all fail with the same message.
    groups, most = max(found, key=lambda own: own[0] - own[1])
    if groups > most:
        raise RunError(
            f"the plan {plan} has a rank in {groups} distinct groups, and Transformer Engine needs a communicator for "
            f"each, of several hundred MB on its device, where {most} find room; plan with 'fcp plan --max-groups "
            f"{most}', or set {_VARIABLE}={_OWN} for the ring of fcp, which needs none"
        )


def _cores(models: Iterable[nn.Module]) -> list[Any]:
    return [module for model in models for module in model.modules() if type(module).__name__ == _CORE]


def _members(planned: Iterable[tuple[int, ...]], peers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the global ranks of each group, one per part of the model (tensor or pipeline parallel)."""
    columns: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(columns, tuple(peers))
    return [tuple(column[rank] for rank in ranks) for ranks in planned for column in sorted(set(columns))]
