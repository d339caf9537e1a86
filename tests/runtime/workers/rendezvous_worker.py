"""One rank of jobs under NCCL's semantics (`tests.runtime.rendezvous`), each of which is a process of its own.

Run by torchrun as `-m tests.runtime.workers.rendezvous_worker FOLDER [full]`: the jobs, or what they cover by example. The folder holds the plans. What each case
computed and issued is left as `CASE-RANK.pickle`; where a job hangs, the rank's error as `JOB-RANK.hang`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fcp_cli.errors import RunError
from fcp_cli.integrations import transformers as integration
from fcp_cli.runtime import gradients
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.session import start
from fcp_cli.runtime.transport import ProcessWorld, World
from fcp_cli.training import trainer, weights
from fcp_cli.training.train import main as train
from fcp_cli.verification.emulation import gradients_on_rank
from tests.patience import PATIENCE_SECONDS
from tests.runtime.models import Case
from tests.runtime.rendezvous import BACKEND, HANG_SECONDS, Rendezvous
from tests.runtime.vision_models import build, fetch
from tests.runtime.workers import session_worker, vision_worker
from tests.runtime.workers.leave import leave_hanging, leave_job

assert integration and trainer and weights  # imported once, before each job is forked

LATE, TRAINED, TRAINED_WAVES = "late.parquet", "trained.parquet", "trained-waves.parquet"
WRAPPED = ("ddp", "ddp waves", "fsdp recomputed", "fsdp kept", "hsdp")
MORE_WRAPPED = ("ddp views", "fsdp step", "hsdp kept")
WITH_IMAGES = ("ddp", "fsdp recomputed")
TRAINERS: Mapping[str, tuple[str, str]] = {
    "trainer": (TRAINED, "2"),
    "trainer in waves": (TRAINED_WAVES, "3"),
}


class InsideBackward(GradientSync):
    """DistributedDataParallel left to itself: it reduces inside the rank's last backward."""

    def __init__(self, model: Any, world: World) -> None:
        self.loss_factor = float(world.size)
        self._model = model

    def before_microbatch(self, *, is_last: bool) -> None:
        self._model.require_backward_grad_sync = is_last


def inside_backward(folder: Path) -> Any:
    vars(gradients)["DdpSync"] = InsideBackward
    return session_worker.gradients(folder / LATE, Case(wrapping="ddp"))


def in_another_order(folder: Path) -> None:
    """Rank 0 reduces before it sends, rank 1 receives before it reduces."""
    rank, token = dist.get_rank(), torch.zeros(2)
    rings = dist.new_group(list(range(dist.get_world_size())), group_desc="rings")
    reduction = None if rank == 1 else dist.all_reduce(token, async_op=True)
    if rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 1, rings)])
    if rank == 1:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 0, rings)])[0].wait()
        reduction = dist.all_reduce(token, async_op=True)
    assert reduction is not None
    reduction.wait()


def unbatched(folder: Path) -> None:
    """All ranks send before they receive, each message by itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.ones(1), (rank + 1) % size)
    received = dist.irecv(torch.ones(1), (rank - 1) % size)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()


def with_images(folder: Path, name: str) -> Any:
    plan, case = vision_worker.CASES[name]
    with start(folder / f"{case.family}-{plan}", fetch(case)) as session:
        return gradients_on_rank(session, *build(case))


def trained(folder: Path, name: str) -> None:
    plan, zero = TRAINERS[name]
    words = ("--plan", str(folder / plan), "--manifest", str(folder / "lengths.parquet"), "--model", "qwen3-tiny")
    assert train([*words, "--run-dir", str(folder / name), "--zero", zero, "--steps", "2", "--quiet"]) == 0


def wrapped(*names: str) -> tuple[int, Mapping[str, Run]]:
    return 1, {name: partial(session_worker.gradient_case, name=name) for name in names}


Run = Callable[[Path], Any]
# Name of a job: hardware queues, and the cases that each rank runs. The first must end, the others not all.
ENDING: Mapping[str, tuple[int | None, Mapping[str, Run]]] = {
    "wrapped": wrapped(*WRAPPED),
    "images": (1, {f"images {name}": partial(with_images, name=name) for name in WITH_IMAGES}),
    "trainer": (1, {name: partial(trained, name=name) for name in TRAINERS}),
    "inside backward on many queues": (None, {"inside backward on many queues": inside_backward}),
}
HANGING: Mapping[str, tuple[int | None, Mapping[str, Run]]] = {
    "inside backward": (1, {"inside backward": inside_backward}),
    "another order": (1, {"another order": in_another_order}),
    "another order on many queues": (None, {"another order on many queues": in_another_order}),
    "unbatched": (None, {"unbatched": unbatched}),
}


def run_job(folder: Path, job: str, queues: int | None, cases: Mapping[str, Run], hang_seconds: float) -> NoReturn:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = Rendezvous(queues=queues, hang_seconds=hang_seconds, job=job)
    device.register(BACKEND)
    store = PrefixStore(job, TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False))
    patience = timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=patience)
    hosts = dist.new_group(backend="gloo", timeout=patience)
    # What hosts tell each other beside a device's work never goes through its queues.
    mock.patch.object(ProcessWorld, "_hosts", lambda _self: hosts).start()
    for name, run in cases.items():
        before = len(device.operations)
        try:
            found = run(folder)
        except RunError as error:
            (folder / f"{name}-{rank}.hang").write_text(str(error))
            leave_hanging(store, size)
        left = {"found": found, "operations": device.operations[before:], "groups": dict(device.groups)}
        (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(left))
    leave_job()


def run_jobs(
    folder: Path, jobs: Mapping[str, tuple[int | None, Mapping[str, Run]]], hang_seconds: float
) -> Sequence[str]:
    """Run jobs side by side, each in a child of this rank; return those that failed."""
    children = {}
    for job, (queues, cases) in jobs.items():
        child = os.fork()
        if not child:
            try:
                run_job(folder, job, queues, cases, hang_seconds)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children[child] = job
    return [job for child, job in children.items() if os.waitpid(child, 0)[1]]


def main(folder: Path, *, full: bool) -> None:
    torch.set_num_threads(1)
    # Where nothing should hang, a busy machine must not look as if something did.
    ending, hanging = ({"wrapped": wrapped(*MORE_WRAPPED)}, {}) if full else (ENDING, HANGING)
    failed = [*run_jobs(folder, ending, PATIENCE_SECONDS / 4), *run_jobs(folder, hanging, HANG_SECONDS)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), full="full" in sys.argv[2:])
