"""All ranks of the job, as the runtime needs them besides rings: a few small collectives."""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class World(Protocol):
    """Every rank calls the same methods in the same order. Tensors are changed in place."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to all."""
        ...


class ProcessWorld:
    """The default process group of torch.distributed."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)


def local_device() -> torch.device:
    """The device of this process: its local rank's CUDA or NPU device where there is one, else the CPU.

    Where the script has already set up torch.distributed, its back end decides.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, local_rank)
    return torch.device("cpu")


def join_process_group(device: torch.device) -> bool:
    """Initialise torch.distributed unless the script has; true if it was done here.

    Without torchrun's environment variables the process is the only rank.
    """
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device.type]
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return True
