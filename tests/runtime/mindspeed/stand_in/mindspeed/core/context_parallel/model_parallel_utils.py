"""The static rings of a job, in module globals."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from mindspeed.core.context_parallel import mpu

_CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW: list[int] | None = None
_CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV: list[int] | None = None
_CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_DKV: list[int] | None = None


def initialize_model_parallel_cp_wrapper(initialize_model_parallel: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialize_model_parallel)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        global _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW
        global _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV
        global _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_DKV
        initialize_model_parallel(*args, **kwargs)
        _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW = [dist.get_rank()]
        _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV = mpu.get_context_parallel_global_ranks()
        _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_DKV = mpu.get_context_parallel_global_ranks()

    return wrapper


def get_ring_ranks_for_intra_window() -> list[int]:
    assert _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW is not None
    return _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW


def get_ring_ranks_for_inter_window_kv() -> list[int]:
    assert _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV is not None
    return _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV


def get_ring_ranks_for_inter_window_dkv() -> list[int]:
    assert _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_DKV is not None
    return _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_DKV
