"""A small Qwen3.5 with a mixture of experts; its sequences are those of Qwen3-VL."""

from __future__ import annotations

from functools import partial

from tests.runtime import qwen3_5_models
from tests.runtime.qwen3_vl_models import inputs_of as inputs_of
from tests.runtime.qwen3_vl_models import logits_alone as logits_alone
from tests.runtime.qwen3_vl_models import sequence as sequence

model = partial(qwen3_5_models.model, "qwen3_5_moe")
