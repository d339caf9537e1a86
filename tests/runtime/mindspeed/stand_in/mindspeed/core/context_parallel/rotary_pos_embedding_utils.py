"""Cuts a rotary table for the group that Megatron names in the call."""

from typing import Any

import torch
from torch import Tensor

from mindspeed.core.context_parallel import mpu


def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, *_: Any) -> Tensor:
    """The chunks of this rank, an early and a late one; later lines of Megatron give their own group as well."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return pos_emb
    chunks = pos_emb.chunk(2 * size, dim=seq_dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=seq_dim)
