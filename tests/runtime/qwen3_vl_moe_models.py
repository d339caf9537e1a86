"""A small Qwen3-VL with a mixture of experts; its sequences are those of Qwen3-VL."""

from __future__ import annotations

from typing import Any

from tests.runtime import qwen3_vl_models
from tests.runtime.qwen3_vl_models import inputs_of as inputs_of
from tests.runtime.qwen3_vl_models import logits_alone as logits_alone
from tests.runtime.qwen3_vl_models import sequence as sequence


def model() -> Any:
    """Unmodified, with random weights."""
    import transformers

    dense = qwen3_vl_models.config()
    text = {**dense.text_config.to_dict(), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text["model_type"] = "qwen3_vl_moe_text"
    vision = {**dense.vision_config.to_dict(), "model_type": "qwen3_vl_moe_vision"}
    tokens = {f"{name}_token_id": getattr(dense, f"{name}_token_id") for name in _TOKENS}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)
    kind: Any = transformers.Qwen3VLMoeForConditionalGeneration
    return kind._from_config(config, experts_implementation="eager")  # grouped products of CPUs know no fp64


_TOKENS = ("image", "video", "vision_start", "vision_end")
