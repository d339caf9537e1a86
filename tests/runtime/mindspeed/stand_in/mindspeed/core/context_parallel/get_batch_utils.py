"""Slices a batch for the static group."""

from typing import Any

from mindspeed.args_utils import get_full_args
from mindspeed.core.context_parallel import mpu


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    size, rank = get_full_args().context_parallel_size, mpu.get_context_parallel_rank()
    if size == 1:
        return batch
    return {name: tensor.chunk(size, dim=-1)[rank] for name, tensor in batch.items()}
