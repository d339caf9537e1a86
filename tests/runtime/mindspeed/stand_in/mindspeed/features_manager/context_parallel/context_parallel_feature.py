"""Puts MindSpeed's context parallelism into Megatron."""

from typing import Any


class ContextParallelFeature:
    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from megatron.core.transformer.attention import Attention

        from mindspeed.core.context_parallel.adaptor import attention_init_wrapper
        from mindspeed.core.context_parallel.dot_product_attention import MindSpeedCPDotProductAttention
        from mindspeed.core.context_parallel.model_parallel_utils import initialize_model_parallel_cp_wrapper
        from mindspeed.core.context_parallel.rotary_pos_embedding_utils import get_pos_emb_on_this_cp_rank

        Attention.__init__ = attention_init_wrapper(Attention.__init__)
        home = "megatron.core.transformer.dot_product_attention"
        patch_manager.register_patch(f"{home}.DotProductAttention", MindSpeedCPDotProductAttention)
        patch_manager.register_patch(
            "megatron.core.parallel_state.initialize_model_parallel", initialize_model_parallel_cp_wrapper
        )
        patch_manager.register_patch(
            "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank",
            get_pos_emb_on_this_cp_rank,
        )
