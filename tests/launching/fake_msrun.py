"""Stands for msrun where MindSpore is not installed: its options, the variables it sets, its logs, its manners.

As MindSpore 2.10: the node that has the master address also starts a scheduler, with the same command; ranks are
sessions of their own; a failed rank ends the others, and then the scheduler is waited for; SIGTERM leaves them all
behind. It runs whatever `python` PATH has.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.launching.msrun_options import parser


def is_local(address: str) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.bind((address, 0))
        return True
    return False


def command(task: str, arguments: Sequence[str]) -> list[str]:
    return [task, *arguments] if task in ("python", "python3", "pytest") else ["python", task, *arguments]


def main() -> int:
    options = parser().parse_args()
    words = command(options.task_script, options.task_script_args)
    logs = Path(options.log_dir)
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ |= {"RANK_SIZE": str(options.worker_num), "MS_WORKER_NUM": str(options.worker_num)}
    os.environ |= {"MS_SCHED_HOST": options.master_addr, "MS_SCHED_PORT": str(options.master_port)}
    os.environ |= {"MS_TOPO_TIMEOUT": str(options.cluster_time_out)}
    os.environ |= {"HCCL_CONNECT_TIMEOUT": "600", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    scheduler = None
    if is_local(options.master_addr):
        os.environ |= {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
        with (logs / "scheduler.log").open("wb") as log:
            scheduler = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    workers, tails = [], []
    for local_rank in range(options.local_worker_num):
        rank = str(options.node_rank * options.local_worker_num + local_rank)
        os.environ |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": str(local_rank)}
        path = logs / f"worker_{rank}.log"
        with path.open("wb") as log:
            workers.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        if rank in options.tail_worker_log.split(","):
            tails.append(subprocess.Popen(["tail", "-f", path]))
    if not options.join:
        return 0
    failed = wait(workers)
    for process in tails:
        process.kill()
    if scheduler is not None and scheduler.wait():
        failed = True
    return int(failed)


def wait(workers: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended, or one badly: the others are killed then. Looks once a second, in the order of ranks."""
    while True:
        statuses = [worker.poll() for worker in workers]
        for worker, status in zip(workers, statuses, strict=True):
            if status:
                print(f"Worker process {worker.pid} exit with exception. Error code: {status}.", flush=True)
                kill(workers)
                return True
        if all(status == 0 for status in statuses):
            return False
        time.sleep(1)


def kill(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
