"""Batches of scripts that read data on one process of a replica only, e.g. Megatron-LM's `pretrain_gpt.py`.

There, the first tensor-parallel process broadcasts batches of a static length; middle stages of a pipeline read none.
Under a plan, lengths differ, so the first process of a replica broadcasts its whole step, from which each process takes
its batches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fcp_cli.integrations.megatron.data.microbatch import current_microbatch
from fcp_cli.integrations.megatron.data.samples import ATTENTION_MASK, LOSS_MASK, POSITIONS, TOKENS, LocalStep

_HOOKED = "get_batch_on_this_tp_rank"
# Up to 0.18, it reads from an iterator; from 0.19 on, it gets the first process's batch.
_MODULES = ("megatron.training.utils", "megatron.core.utils")
# In the order in which scripts unpack the batch.
_ENTRIES = (TOKENS, "labels", LOSS_MASK, ATTENTION_MASK, POSITIONS)
_hooked: list[Callable[..., Any]] = []


def hook_batches(utils: ModuleType) -> None:
    """Hook one of `_MODULES` right after its import, before other modules import from it by name.

    In a planned micro-batch, each process reads its own batch; elsewhere, e.g. in evaluation, the first process
    broadcasts as usual.
    """
    get_batch: Callable[..., Any] | None = getattr(utils, _HOOKED, None)
    if get_batch is None:
        return
    reads = "data_iterator" in inspect.signature(get_batch).parameters

    @wraps(get_batch)
    def get_planned_batch(*args: Any, **kwargs: Any) -> Any:
        microbatch = current_microbatch.get()
        if microbatch is None or parallel_state.get_tensor_model_parallel_world_size() == 1:
            return get_batch(*args, **kwargs)
        batch = next(args[0] if args else kwargs["data_iterator"]) if reads else microbatch.batch
        device = microbatch.positions.device
        return _ScriptBatch((name, batch[name].to(device, non_blocking=True)) for name in _ENTRIES)

    setattr(utils, _HOOKED, get_planned_batch)
    _hooked.append(get_planned_batch)


class _ScriptBatch(dict[str, Any]):
    """A batch whose missing entries are None: scripts from 0.19 on also read e.g. packing and groups."""

    def __missing__(self, name: str) -> None:
        return None


def shares_data(data_iterator: Any, replica: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a process that reads data must broadcast its step within this replica. Collective over it.

    False if the script broadcasts batches with an unhooked function of its own, which expects the static length.

    Args:
        data_iterator: data iterator of this process; None if it reads no data.
        replica: processes of one rank of the plan.
        device: device for the collective.
    """
    found = {getattr(sys.modules.get(module), _HOOKED, None) for module in _MODULES}
    if dist.get_world_size(replica) == 1 or not found.intersection(_hooked):
        return False
    lacking = torch.tensor(int(data_iterator is None), device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX, group=replica)
    return bool(lacking)


def share(read: Callable[[], LocalStep], replica: dist.ProcessGroup) -> LocalStep:
    """Read a step on the first process of a replica, and broadcast it to all. Collective."""
    first = dist.get_process_group_ranks(replica)[0]
    found: list[Any] = [read() if dist.get_rank() == first else None]
    dist.broadcast_object_list(found, src=first, group=replica)
    step: LocalStep = found[0]
    return step
