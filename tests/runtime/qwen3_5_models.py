"""A small Qwen3.5, dense or with experts, with its encoder; its sequences are those of Qwen3-VL."""

from __future__ import annotations

from typing import Any

from tests.runtime import qwen3_vl_models
from tests.runtime.linear_models import LINEAR
from tests.runtime.qwen3_vl_models import inputs_of as inputs_of
from tests.runtime.qwen3_vl_models import logits_alone as logits_alone
from tests.runtime.qwen3_vl_models import sequence as sequence


def model(kind: str = "qwen3_5") -> Any:
    """Unmodified, with random weights."""
    import transformers

    dense = qwen3_vl_models.config()
    text = {**LINEAR, "vocab_size": dense.text_config.vocab_size, "head_dim": 16}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    skipped = ("model_type", "deepstack_visual_indexes")
    vision = {name: value for name, value in dense.vision_config.to_dict().items() if name not in skipped}
    tokens = {f"{name}_token_id": getattr(dense, f"{name}_token_id") for name in _TOKENS}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    family: Any = transformers.AutoModelForImageTextToText
    return family.from_config(config, experts_implementation="eager")  # grouped products of CPUs know no fp64


_TOKENS = ("image", "video", "vision_start", "vision_end")
