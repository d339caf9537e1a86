"""A job of paced ranks: processes of one machine that follow plans through the real runtime, over gloo.

They are forked from one process that has imported PyTorch, so that sixteen cost little more than one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pace.device import Device, Links, PacedModel, PacedTransport, attention_on
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.machine.network import free_ports
from fcp_cli.plan.reader import PlanReader
from fcp_cli.runtime.session.start import start

_FIRST_PORT = 29_700


def run_job(job: Callable[..., None], num_ranks: int, *arguments: Any, most_seconds: float) -> None:
    """Run `job(*arguments)` on every rank of a gloo job, and wait for all.

    Raises:
        RuntimeError: a rank failed, or they took longer than `most_seconds`; none is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = free_ports(_FIRST_PORT, 1)
    ranks = [
        context.Process(target=_run_rank, args=(rank, num_ranks, port, job, arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + most_seconds
    try:
        while any(process.exitcode is None for process in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            if failed:
                raise RuntimeError(f"rank {failed[0]} of {num_ranks} paced ranks failed; its message is above")
            if time.monotonic() > until:
                raise RuntimeError(f"{num_ranks} paced ranks took longer than {most_seconds:.0f} s")
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run_rank(rank: int, num_ranks: int, port: int, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job(*arguments)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


def follow(plans: Sequence[Path]) -> None:
    """Follow plans one after the other, each by the seconds of its own cost profile; write metrics beside each."""
    for plan in plans:
        _follow(plan)


def _follow(plan: Path) -> None:
    reader = PlanReader(plan)
    profile = parse_cost_profile(reader.metadata.cost_profile, name=str(plan))
    lengths: dict[int, int] = {}
    for planned in reader.steps():
        lengths |= zip(planned.sequences.tolist(), planned.lengths.tolist(), strict=True)
    device = Device()
    session = start(plan, lambda row: torch.zeros(lengths[row], dtype=torch.int64), metrics=metrics_of(plan))
    links = Links(profile=profile, rank=session.rank, ranks_per_node=reader.metadata.ranks_per_node)
    session.transport = PacedTransport(session.transport, device, links)
    model = PacedModel(device, profile.coefficients)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with session, attention_on(device, profile.coefficients):
        for step in session.steps(model):
            device.hold(time.perf_counter())
            for microbatch in step:
                loss = microbatch.loss(model(microbatch.input_ids))
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def metrics_of(plan: Path) -> Path:
    """Return where a plan's run writes what was measured."""
    return plan.with_suffix(".jsonl")
