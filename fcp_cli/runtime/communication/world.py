"""All ranks of the job, as the runtime needs them besides rings: a few small collectives, joining and leaving."""

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

# Seconds that ranks wait for each other in an operation; `fcp launch --rank-timeout` sets it.
_TIMEOUT_VARIABLE = "FCP_RANK_TIMEOUT"
# How long the ranks of msrun wait for each other at the start; it sets this variable for them.
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
        """Copy rank 0's tensor to all."""
        ...

    def start_sum(self, tensor: Tensor) -> Waitable:
        """Begin to sum a tensor in host memory, in parallel with the devices' work."""
        ...

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        """Tell one rank a tensor in host memory, and hear one from another, which does the same."""
        ...


class ProcessWorld:
    """The default process group of torch.distributed."""

    def __init__(self) -> None:
        self._host_group: dist.ProcessGroup | None = None  # None: the default one

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
        group = self._hosts()  # hops of rings use a separate group
        both = [dist.P2POp(dist.isend, told, to, group), dist.P2POp(dist.irecv, heard, source, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _hosts(self) -> dist.ProcessGroup | None:
        """Return the group of the hosts; every rank asks for it first in a sum, since it may have to be made."""
        backends = dist.get_backend_config()
        if self._host_group is None and "cpu:" not in backends and any(kind in backends for kind in ("nccl", "hccl")):
            self._host_group = dist.new_group(backend="gloo")  # the script's own group carries nothing of the host's
        return self._host_group


def gather_rows(world: World, own: Tensor, device: torch.device | None = None) -> list[Tensor]:
    """Return the tensors [n, ...] of all ranks, in order, which may differ in n. Every rank calls it.

    They are sums of tensors of zeros in which each rank has its place.

    Args:
        world: all ranks.
        own: this rank's.
        device: the device of the collectives; None: between hosts.
    """
    counts = [count for (count,) in gather_words(world, (len(own),), device)]
    begin = sum(counts[: world.rank])
    told = torch.zeros((sum(counts), *own.shape[1:]), dtype=own.dtype, device="cpu" if device is None else device)
    told[begin : begin + len(own)] = own
    # The same on all ranks, so that none waits alone.
    if len(told):
        _sum(world, told, device)
    return list(torch.split(told, counts))


def gather_words(world: World, own: Sequence[int], device: torch.device | None = None) -> list[list[int]]:
    """Return the numbers of all ranks, in order, as many of each. Every rank calls it.

    Args:
        world: all ranks.
        own: this rank's: with a device, numbers that every back end's int32 can hold.
        device: the device of the collectives; None: between hosts.
    """
    # Kept from a script's own default device.
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
    """Return the texts of all ranks, in order, on every rank; told between hosts."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    return [told.numpy().tobytes().decode() for told in gather_rows(world, own)]


def _msrun_store(rank: int, size: int, seconds: int) -> Any:
    """Return the rendezvous store of ranks that msrun started; unlike torchrun, it does not join nodes first."""
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
    store.set_timeout(dist.default_pg_timeout)  # the other was only for joining
    return store


def local_device() -> torch.device:
    """Return the device of this process: its local rank's CUDA or NPU device if there is one, else the CPU.

    If the script has already set up torch.distributed, its back end decides.
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
    """Return how long ranks are to wait for each other; None: as long as torch does by itself."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise RunError(f"{_TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds, 1 or more")
    return timedelta(seconds=int(text))


def join_process_group(device: torch.device) -> bool:
    """Initialise torch.distributed unless the script has; return whether it was done here.

    Without torchrun's environment variables the process is the only rank.
    """
    end_with_launcher()
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        # Before the group is made: communicators of NCCL and HCCL are bound to the current device.
        torch.get_device_module(device).set_device(device)
    # gloo is there on every device, for messages from host memory.
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device.type]
    # With its device, NCCL makes the communicator now instead of at the first operation, and barriers know theirs.
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
    """Destroy the process groups that are left when a script has ended, before the interpreter does.

    Gloo's threads may still hold a tensor of the last collective, and a thread that needs Python while Python ends
    aborts the process: a job whose work was done would fail. After an exception nothing is done here: it may have
    left a collective that will never end, and the job fails in any case.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
