"""Data of scripts that read it on only one process of a replica, as Megatron-LM's `pretrain_gpt.py` does.

Its first tensor-parallel process has the data set and broadcasts batches of the static length to the others; stages in
the middle of a pipeline have none. Under a plan lengths differ, so the first process of a replica gives its whole step
to the others, and each takes its batches from that.
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
# Where it is, by version: to 0.18 it reads from an iterator, from 0.19 on it gets the first process's batch.
_MODULES = ("megatron.training.utils", "megatron.core.utils")
# In the order in which scripts unpack them.
_ENTRIES = (TOKENS, "labels", LOSS_MASK, ATTENTION_MASK, POSITIONS)
_hooked: list[Callable[..., Any]] = []


def hook_batches(utils: ModuleType) -> None:
    """Hook one of `_MODULES`, to be called once it has been imported, before its importer sees it.

    Within a micro-batch of a plan, each process reads its own batch; elsewhere, e.g. in evaluation, the first process
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
    """Further values for scripts from 0.19 on (sequences packed by others, their groups) are None under a plan."""

    def __missing__(self, name: str) -> None:
        return None


def shares_data(data_iterator: Any, replica: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the process that reads data has to pass its step on to others of this replica, which read none.

    Collective over the replica. False, too, for scripts that broadcast batches with a function of their own, which was
    not hooked: it expects the static length.

    Args:
        data_iterator: this process's; None if it reads no data.
        replica: the processes of one rank of the plan.
        device: the device of the collective.
    """
    found = {getattr(sys.modules.get(module), _HOOKED, None) for module in _MODULES}
    if dist.get_world_size(replica) == 1 or not found.intersection(_hooked):
        return False
    lacking = torch.tensor(int(data_iterator is None), device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX, group=replica)
    return bool(lacking)


def share(read: Callable[[], LocalStep], replica: dist.ProcessGroup) -> LocalStep:
    """Return the batch that the first process of a replica reads, on all of them. All call it."""
    first = dist.get_process_group_ranks(replica)[0]
    found: list[Any] = [read() if dist.get_rank() == first else None]
    dist.broadcast_object_list(found, src=first, group=replica)
    step: LocalStep = found[0]
    return step
