"""Counts the operations of one forward pass of a model, as a sum over its kinds of layers.

Two per matrix entry and token, of all experts those that a token goes to; causal attention by softmax H (D + Dv) per
layer and pair of tokens, half of a full mask's (D of queries and keys, Dv of values), in a window as many as
`cost.model.windowed_pairs` says. Linear attention works on chunks of C tokens with a state of Dk x Dv in each head:
2 C (3 Dk + 2 Dv) + 6 Dk Dv per token and head. State spaces of P x N in each head do so, too: 2 C (N + P) + 4 P N per
token and head, as in transformers' own code, which repeats the group's states for each head. A vision
encoder attends without a mask, 4 h per block and pair of patches of an image or frame, or of a window, whose pairs grow
with the patches alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fcp_cli.models.figures import LINEAR_CHUNK, Attention
from fcp_cli.models.layers import LanguageModel
from fcp_cli.models.model import ModelSpec, VisionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Operations of one forward pass of the whole model on one device."""

    linear_per_token: float  # matrices of the layers and the output layer, and updates of states
    attention_per_token2: float  # causal, of layers without windows
    window_per_token2: float = 0.0  # causal, of layers with them
    vision_per_patch: float = 0.0
    vision_per_patch2: float = 0.0  # full mask within one image or frame


def forward_operations(spec: ModelSpec) -> Operations:
    """Count the operations of one forward pass, with the output layer: it is 22 % of the matrices of Qwen3-1.7B."""
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
    """Count the matrices, and attention within windows: whole ones, which overrates those at the edges of a picture."""
    matrices = 2.0 * (vision.block_parameters + vision.projector_parameters / vision.merge_size**2)
    windowed_blocks = vision.depth - vision.full_attention_blocks
    return matrices + 4.0 * windowed_blocks * vision.hidden_size * vision.window_patches
