"""Runs paced ranks on this machine, which follow plans through the real runtime over gloo.

    python -m fcp_cli.demo.ranks NUM_RANKS PLAN [PLAN ...]

Ranks are forked from a process that has imported PyTorch, so that sixteen cost little more than one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # before the fork: every optimizer imports it, which takes a second
import torch.distributed as dist

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.demo.device import Device, Links, PacedModel, PacedTransport, attention_on
from fcp_cli.demo.paced import metrics_of
from fcp_cli.machine.network import free_ports
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.session.start import start

_FIRST_PORT = 29_700


def main(num_ranks: int, plans: Sequence[Path]) -> int:
    """Run the plans one after another on all ranks; on the first failure kill all ranks and return 1."""
    port = free_ports(_FIRST_PORT, 1)
    ranks = {_fork(rank, num_ranks, port, plans) for rank in range(num_ranks)}
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
            return 1
    return 0


def _fork(rank: int, num_ranks: int, port: int, plans: Sequence[Path]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        _run_rank(rank, num_ranks, port, plans)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _run_rank(rank: int, num_ranks: int, port: int, plans: Sequence[Path]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for plan in plans:
        _follow(plan)
    dist.barrier()  # rank 0 hosts the store
    dist.destroy_process_group()


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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [Path(word) for word in sys.argv[2:]]))
