"""How a rank that runs many cases in one process gives back the threads of each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

MOST_THREADS = 100


@contextmanager
def own_groups() -> Iterator[None]:
    """Destroy the process groups that are made within it. Collective over all ranks.

    Megatron's `destroy_model_parallel` only forgets its groups, a plan's communicators live as long as its job, and
    every gloo group keeps about four threads: a process that runs one case after another would gather thousands.
    """
    before = set(_world.pg_map)
    yield
    require_few_threads()
    dist.barrier()  # no rank may still be sending on them
    for group in [group for group in _world.pg_map if group not in before]:
        dist.destroy_process_group(group)
    gc.collect()  # a group's threads end with the last reference to it, and models hold references in cycles


def require_few_threads() -> None:
    """Raise AssertionError if this process has more threads than a rank of a test's job may take from the others."""
    tasks = Path("/proc/self/task")
    found = len(list(tasks.iterdir())) if tasks.exists() else 1
    assert found <= MOST_THREADS, f"{found} threads: destroy the process groups of each case"
