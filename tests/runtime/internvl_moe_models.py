"""A small InternVL3.5 on Qwen3 with a mixture of experts; its sequences are those of InternVL."""

from __future__ import annotations

from typing import Any

from tests.runtime import internvl_models
from tests.runtime.internvl_models import inputs_of as inputs_of
from tests.runtime.internvl_models import logits_alone as logits_alone
from tests.runtime.internvl_models import sequence as sequence

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def config() -> Any:
    return internvl_models.config(model_type="qwen3_moe", head_dim=8, **_EXPERTS)


def model() -> Any:
    """Unmodified, with random weights."""
    import transformers

    kind: Any = transformers.InternVLForConditionalGeneration
    return kind._from_config(config(), experts_implementation="eager")  # grouped products of CPUs know no fp64
