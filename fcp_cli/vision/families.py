"""Vision-language model families that can follow a plan, by `model_type` in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Tensor

from fcp_cli.vision import gemma3, gemma4, internvl, qwen2_5_vl, qwen3_vl
from fcp_cli.vision.parts import Kind, VisualPart


class VisionModule(Protocol):
    """Interface of a family's module for the runtime; data sets also call its `visual_sequence`."""

    def encode(self, model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
        """Return the embeddings [tokens, levels, hidden] of this rank's parts."""

    def encoder_outputs(self, embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
        """Return the arguments of the model's forward that replace pixels by embeddings [tokens, levels, hidden]."""


FAMILIES: Final[Mapping[str, VisionModule]] = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,  # experts only in the language model
    "qwen3_5": qwen3_vl,  # the same encoder without deepstack
    "qwen3_5_moe": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "internvl": internvl,
    "gemma3": gemma3,
    "gemma4": gemma4,
}
