"""One rank of a Megatron job under NCCL's semantics with one hardware queue; leaves what `gradient_worker` leaves.

Run by torchrun as `-m tests.runtime.megatron.rendezvous_worker FOLDER`, which holds the plans. What each case issued is
left as `CASE-RANK.operations`.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import tests.runtime.megatron.tiny  # noqa: F401  isort: skip  first: it lets megatron run on the CPU

import torch
import torch.distributed as dist

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron import follow
from tests.patience import PATIENCE_SECONDS
from tests.runtime.megatron import gradient_worker
from tests.runtime.megatron.gradient_worker import CASES, PARALLEL_CASES
from tests.runtime.rendezvous import BACKEND, HANG_SECONDS, Rendezvous
from tests.runtime.workers.leave import leave_hanging, leave_job

EQUAL = ("overlapped", "gathering")
SHARES = ("sequence", "pipeline", "virtual stages")


OVERLAPPING = "reducing inside backward"


def leave_share(folder: Path, name: str) -> None:
    case = PARALLEL_CASES[name]
    with gradient_worker.joined():
        whole = gradient_worker.whole_gradients(folder / case.plan, case)
    with gradient_worker.joined(case):
        error = gradient_worker.worst_share_error(folder / case.plan, case, *whole)
    (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(error))


def leave_equal(folder: Path, name: str) -> None:
    case = CASES["overlapped" if name == OVERLAPPING else name]
    with gradient_worker.joined(case):
        found = gradient_worker.gradients_planned(folder / case.plan, case)
        (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
        if dist.get_rank() == 0:
            alone = gradient_worker.gradients_alone(folder / case.plan, case)
            (folder / f"{name}-alone.pickle").write_bytes(pickle.dumps(alone))


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.compiler.set_stance("force_eager")
    device = Rendezvous(queues=1, hang_seconds=PATIENCE_SECONDS / 4)
    device.register(BACKEND)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=PATIENCE_SECONDS))
    runs: dict[str, Callable[[], None]] = {
        **{name: partial(leave_share, folder, name) for name in SHARES},
        **{name: partial(leave_equal, folder, name) for name in EQUAL},
    }
    for name, run in runs.items():
        before = len(device.operations)
        run()
        left = (device.operations[before:], dict(device.groups))
        (folder / f"{name}-{dist.get_rank()}.operations").write_bytes(pickle.dumps(left))
    device.hang_seconds = HANG_SECONDS
    with mock.patch.object(follow, "reduced_after_backwards", lambda *_: nullcontext()):
        try:
            leave_equal(folder, OVERLAPPING)
        except RunError as error:
            (folder / f"{OVERLAPPING}-{dist.get_rank()}.hang").write_text(str(error))
            leave_hanging(dist.distributed_c10d._get_default_store(), dist.get_world_size())
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
