"""Counts the operations (FLOPs) of a model's forward pass, as a sum over layer kinds.

- Matrices: 2 per entry and token; of experts, only active ones.
- Causal softmax attention: H (D + Dv) per layer and token pair, half of a full mask's (D = head size of queries and
  keys, Dv of values). For windows, `cost.model.windowed_pairs` counts the pairs.
- Linear attention, in chunks of C tokens with a Dk x Dv state per head: 2 C (3 Dk + 2 Dv) + 6 Dk Dv per token and head.
- State spaces with a P x N state per head: 2 C (N + P) + 4 P N per token and head, as in transformers, which repeats
  a group's states for each head.
- Vision encoder: full attention, 4 h per block and pair of patches in an image, frame or window. Pairs in windows grow
  linearly with the patches.
"""

from __future__ import annotations

from dataclasses import dataclass

from fcp_cli.models.figures import LINEAR_CHUNK, Attention
from fcp_cli.models.layers import LanguageModel
from fcp_cli.models.model import ModelSpec, VisionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operations of a model's forward pass on one device."""

    linear_per_token: float  # layer matrices, output layer and state updates
    attention_per_token2: float  # causal, layers without windows
    window_per_token2: float = 0.0  # causal, layers with windows
    vision_per_patch: float = 0.0
    vision_per_patch2: float = 0.0  # full mask within an image or frame


def forward_operations(spec: ModelSpec) -> Operations:
    """Count the operations of a forward pass, including the output layer (22 % of Qwen3-1.7B's matrices)."""
    vision = spec.vision
    return Operations(
        linear_per_token=2.0 * spec.matrix_parameters + _linear_attention(spec) + _state_spaces(spec),
        attention_per_token2=1.0 * spec.query_elements("full", "latent"),
        window_per_token2=1.0 * spec.query_elements("window"),
        vision_per_patch=_operations_per_patch(vision) if vision else 0.0,
        vision_per_patch2=4.0 * vision.full_attention_blocks * vision.hidden_size if vision else 0.0,
    )


def _layers(spec: LanguageModel, attention: Attention) -> int:
    return sum(kind.attention == attention for kind in spec.layer_kinds)


def _linear_attention(spec: LanguageModel) -> float:
    layers = _layers(spec, "linear")
    if not layers:
        return 0.0
    linear = spec.linear_figures
    keys, values = linear.key_size, linear.value_size
    return layers * linear.value_heads * (2.0 * LINEAR_CHUNK * (3 * keys + 2 * values) + 6.0 * keys * values)


def _state_spaces(spec: LanguageModel) -> float:
    layers = _layers(spec, "mamba")
    if not layers:
        return 0.0
    mamba = spec.mamba_figures
    size, state = mamba.head_size, mamba.state_size
    return layers * mamba.heads * (2.0 * mamba.chunk_size * (state + size) + 4.0 * size * state)


def _operations_per_patch(vision: VisionSpec) -> float:
    """Count matrices and windowed attention, with all windows full: slightly too much at picture edges."""
    matrices = 2.0 * (vision.block_parameters + vision.projector_parameters / vision.merge_size**2)
    windowed_blocks = vision.depth - vision.full_attention_blocks
    return matrices + 4.0 * windowed_blocks * vision.hidden_size * vision.window_patches
