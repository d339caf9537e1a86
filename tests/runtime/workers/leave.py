"""How a rank of a test's job begins, what it leaves of its cases, and how it ends."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fcp_cli.errors import FcpError
from tests.patience import PATIENCE_SECONDS, wait_until


def join_job() -> int:
    """Join the other ranks over gloo, and return this one's number."""
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    return dist.get_rank()


def leave_cases(folder: Path, cases: Mapping[str, Callable[[], Any]], *more_errors: type[Exception]) -> None:
    """Run cases in turn, and leave as `CASE-RANK.pickle` what each returns, or the text of its error."""
    expected: tuple[type[Exception], ...] = (FcpError, *more_errors)
    for name, run in cases.items():
        try:
            found = run()
        except expected as error:
            found = str(error)
        (folder / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))


def leave_job() -> NoReturn:
    """End this rank, whose work is done.

    The interpreter's end is not under test, and gloo's threads have been seen to abort a process there.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_hanging(store: Store, size: int) -> NoReturn:
    """End this rank, of whose operations some never end, when all ranks have said where they hang."""
    store.add("hanging", 1)
    wait_until(lambda: store.add("hanging", 0) == size)
    os._exit(0)
