"""Stands in for `megatron.training.utils`, which is not on PyPI: the function through which `pretrain_gpt.py` reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

STATIC_LENGTH = 128
_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float64,
    "attention_mask": torch.bool,
    "position_ids": torch.int64,
}


def get_batch_on_this_tp_rank(data_iterator: Iterator[dict[str, Tensor]] | None) -> dict[str, Tensor]:
    """As Megatron's: the first tensor-parallel process reads, and the others wait for samples of the static length."""
    shape = (1, STATIC_LENGTH)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        batch = next(data_iterator)
    else:
        batch = {name: torch.empty(shape, dtype=dtype) for name, dtype in _DTYPES.items()}
    for name in _DTYPES:
        dist.broadcast(
            batch[name],
            parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    return batch
