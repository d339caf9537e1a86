"""All ranks of the job, outside rings: small collectives, and joining and leaving the process group."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.launcher_watch import end_with_launcher
from fcp_cli.runtime.communication.node_0_store import await_store

# Timeout of collectives in seconds; set by `fcp launch --rank-timeout`.
_TIMEOUT_VARIABLE = "FCP_RANK_TIMEOUT"
# Rendezvous timeout of msrun's ranks in seconds; msrun sets it for them.
_MSRUN_SECONDS = "MS_TOPO_TIMEOUT"


class Waitable(Protocol):
    def wait(self) -> object: ...


class World(Protocol):
    """All ranks of a job. Every rank calls the same methods in the same order. Tensors are changed in place."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> None: ...

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to all ranks."""
        ...

    def start_sum(self, tensor: Tensor) -> Waitable:
        """Start an asynchronous all-reduce of a tensor in host memory."""
        ...

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        """Send the host tensor `told` to rank `to`, and receive `heard` from rank `source`."""
        ...


class ProcessWorld:
    """The default process group of torch.distributed."""

    def __init__(self) -> None:
        self._host_group: dist.ProcessGroup | None = None  # None: the default group

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

    def start_sum(self, tensor: Tensor) -> Waitable:
        work: Waitable = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._hosts(), async_op=True)
        return work

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        group = self._hosts()  # separate from the group of the rings' hops
        both = [dist.P2POp(dist.isend, told, to, group), dist.P2POp(dist.irecv, heard, source, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _hosts(self) -> dist.ProcessGroup | None:
        """Return the group for host tensors; collective at its first call, which may create it."""
        backends = dist.get_backend_config()
        if self._host_group is None and "cpu:" not in backends and any(kind in backends for kind in ("nccl", "hccl")):
            self._host_group = dist.new_group(backend="gloo")  # the script's group has no back end for host tensors
        return self._host_group


def gather_rows(world: World, own: Tensor, device: torch.device | None = None) -> list[Tensor]:
    """All-gather tensors [n, ...] of possibly different n. Every rank calls it.

    Implemented as an all-reduce of zeros into which each rank writes its own rows.

    Args:
        world: all ranks.
        own: this rank's tensor.
        device: device of the collectives, or None for host tensors.
    """
    counts = [count for (count,) in gather_words(world, (len(own),), device)]
    begin = sum(counts[: world.rank])
    told = torch.zeros((sum(counts), *own.shape[1:]), dtype=own.dtype, device="cpu" if device is None else device)
    told[begin : begin + len(own)] = own
    # The condition is the same on all ranks, so none hangs.
    if len(told):
        _sum(world, told, device)
    return list(torch.split(told, counts))


def gather_words(world: World, own: Sequence[int], device: torch.device | None = None) -> list[list[int]]:
    """All-gather numbers, equally many from each rank. Every rank calls it.

    Args:
        world: all ranks.
        own: this rank's numbers; with a device, they must fit int32, which every back end supports.
        device: device of the collectives, or None for host tensors.
    """
    # An explicit device, since the script may have set a default device.
    dtype, place = (torch.int64, torch.device("cpu")) if device is None else (torch.int32, device)
    told = torch.zeros((world.size, len(own)), dtype=dtype, device=place)
    told[world.rank] = torch.tensor(own, dtype=dtype, device=place)
    _sum(world, told, device)
    found: list[list[int]] = told.tolist()
    return found


def _sum(world: World, told: Tensor, device: torch.device | None) -> None:
    if device is None:
        world.start_sum(told).wait()
    else:
        world.all_reduce_sum(told)


def gather_texts(world: World, text: str) -> list[str]:
    """All-gather texts through host tensors."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    return [told.numpy().tobytes().decode() for told in gather_rows(world, own)]


def _msrun_store(rank: int, size: int, seconds: int) -> Any:
    """Return the rendezvous store of ranks started by msrun which, unlike torchrun, does not join nodes first."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = torch._C._distributed_c10d.TCPStore(
            host, port, size, is_master=rank == 0, timeout=timedelta(seconds=seconds)
        )
    except RuntimeError as error:
        raise RunError(
            f"the ranks did not come together at {host}:{port} within {seconds} s; start all nodes with the same plan, "
            "make sure that --master-addr and --master-port are node 0's own, or wait longer with --join-timeout"
        ) from error
    store.set_timeout(dist.default_pg_timeout)  # the timeout above was for joining only
    return store


def local_device() -> torch.device:
    """Return this process's device: the local rank's CUDA or NPU device if there is one, else the CPU.

    If the script has already initialised torch.distributed with gloo, it is the CPU.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, local_rank)
    return torch.device("cpu")


def rank_timeout() -> timedelta | None:
    """Return the timeout of operations between ranks, or None for torch's default."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise RunError(f"{_TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds, 1 or more")
    return timedelta(seconds=int(text))


def join_process_group(device: torch.device) -> bool:
    """Initialise torch.distributed unless the script has; return whether it was initialised here.

    Without torchrun's environment variables the process is the only rank.
    """
    end_with_launcher()
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        # Before the group is created: NCCL and HCCL communicators are bound to the current device.
        torch.get_device_module(device).set_device(device)
    # Always include gloo, for messages from host memory.
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device.type]
    # With device_id, NCCL creates the communicator eagerly, and barriers know their device.
    bound = device if device.type == "cuda" and device.index is not None else None
    given: dict[str, Any] = {"timeout": rank_timeout(), "device_id": bound}
    if "RANK" in os.environ and _MSRUN_SECONDS in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _msrun_store(rank, size, int(os.environ[_MSRUN_SECONDS]))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **given)
    elif "RANK" in os.environ:
        await_store(os.environ)
        dist.init_process_group(backend, **given)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    atexit.register(leave_process_group)
    return True


def leave_process_group() -> None:
    """Destroy the remaining process groups when a script has ended, before the interpreter exits.

    Gloo's threads may still hold a tensor of the last collective, and a thread that needs Python during finalization
    aborts the process: a finished job would fail. After an exception nothing is destroyed: a collective may never
    complete, and the job fails in any case.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
