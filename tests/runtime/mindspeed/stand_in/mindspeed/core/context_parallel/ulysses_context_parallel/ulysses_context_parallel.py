"""Exchanges tokens for heads over the group that a layer was made with, which must not happen under a plan."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class UlyssesContextAttention(nn.Module):
    def __init__(self, local_attention: nn.Module, sequence_process_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.group = sequence_process_group

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("a layer attended over the group that it was made with")
