"""Megatron's core attention with MindSpeed's ring."""

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from mindspeed.core.context_parallel import mpu as parallel_state
from mindspeed.core.context_parallel.model_parallel_utils import (
    get_ring_ranks_for_inter_window_dkv,
    get_ring_ranks_for_inter_window_kv,
    get_ring_ranks_for_intra_window,
)
from mindspeed.core.context_parallel.ring_context_parallel.ring_context_parallel import ringattn_context_parallel


class CPDotProductAttentionImpl:
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        static, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        config.context_parallel_size = static
        self.config = config
        self.softmax_scale = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        assert attention_mask is None, "a mask that was given is used as it is"
        cp_para = {
            "cp_group": parallel_state.get_context_parallel_group(),
            "cp_size": parallel_state.get_context_parallel_world_size(),
            "rank": parallel_state.get_context_parallel_rank(),
            "cp_global_ranks": parallel_state.get_context_parallel_global_ranks(),
            "cp_inner_ranks": get_ring_ranks_for_intra_window(),
            "cp_outer_ranks": get_ring_ranks_for_inter_window_kv(),
            "cp_dkv_outer_ranks": get_ring_ranks_for_inter_window_dkv(),
        }
        out: Tensor = ringattn_context_parallel(
            query, key, value, query.shape[1], cp_para, self.softmax_scale, packed_seq_params=packed_seq_params
        )
        return out


class MindSpeedCPDotProductAttention(CPDotProductAttentionImpl, DotProductAttention):  # type: ignore[misc]
    pass
