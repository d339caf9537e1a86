"""Wraps the core attention of each layer where heads are to be exchanged."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.args_utils import get_full_args
from mindspeed.core.context_parallel import mpu
from mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel import UlyssesContextAttention


def attention_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(layer: Any, *args: Any, **kwargs: Any) -> None:
        init(layer, *args, **kwargs)
        settings = get_full_args()
        if settings.context_parallel_size > 1 and settings.context_parallel_algo in (
            "ulysses_cp_algo",
            "hybrid_cp_algo",
        ):
            layer.core_attention = UlyssesContextAttention(layer.core_attention, mpu.get_context_parallel_group())

    return wrapper
