"""How a rank of a test's job ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tests.patience import wait_until


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
