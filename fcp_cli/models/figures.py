"""Shapes of a language model's layers by kind, and traits of families in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fcp_cli.models.sizes import (
    ExpertCount,
    HeadCount,
    KernelSize,
    LayerCount,
    LayerIndex,
    OptionalWidth,
    TokenCount,
    VocabularySize,
    Width,
)
from fcp_cli.validation import Positive

Architecture: TypeAlias = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "qwen3_vl",
    "qwen2_5_vl",
    "internvl",
    "qwen3_moe",
    "qwen3_vl_moe",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "minimax_m2",
    "glm4_moe_lite",
    "bamba",
    "nemotron_h",
    "gemma4_text",
    "gemma4",
    "mimo_v2_flash",
]
Attention: TypeAlias = Literal["full", "window", "latent", "linear", "mamba", "none"]
Mlp: TypeAlias = Literal["dense", "experts", "none"]

LINEAR_CHUNK: Final = 64
"""Chunk size of linear attention kernels, in tokens."""

Trait: TypeAlias = Literal[
    "fp32 norms",
    "four norms",
    "output bias",
    "sinks",
    "window sinks",
    "expert biases",
    "query gate",
    "shared gate",
    "sigmoid router",
    "16-bit router",
    "wide qk norm",
    "split linear inputs",
    "power norms",
    "value norm",
    "norms of experts",
    "plain mlp",
]
# Features of families beyond shapes. `fp32 norms` multiply by their weight before rounding; `power norms` save the mean
# of squares as well as its root; a `plain mlp` has no gate.
TRAITS: Final[Mapping[Architecture, frozenset[Trait]]] = {
    "gemma3_text": frozenset({"fp32 norms", "four norms"}),
    "gemma3": frozenset({"fp32 norms", "four norms"}),
    "gpt_oss": frozenset({"fp32 norms", "output bias", "sinks", "expert biases"}),
    "deepseek_v3": frozenset({"sigmoid router"}),
    "glm4_moe": frozenset({"sigmoid router"}),
    "glm4_moe_lite": frozenset({"sigmoid router"}),
    "minimax_m2": frozenset({"sigmoid router", "16-bit router", "wide qk norm"}),
    "mimo_v2_flash": frozenset({"sigmoid router", "window sinks"}),
    "qwen3_next": frozenset({"fp32 norms", "query gate", "shared gate"}),
    "qwen3_5": frozenset({"fp32 norms", "query gate", "split linear inputs"}),
    "qwen3_5_moe": frozenset({"fp32 norms", "query gate", "shared gate", "split linear inputs"}),
    "nemotron_h": frozenset({"fp32 norms", "sigmoid router", "plain mlp"}),
    **dict.fromkeys(
        ("gemma4_text", "gemma4"),
        frozenset({"fp32 norms", "four norms", "power norms", "value norm", "norms of experts"}),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """Module names of a layer in transformers."""

    attention: str = "self_attn"
    mamba: str = "mamba"
    mlp: str = "mlp"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"


NAMES: Final[Mapping[Architecture, ModuleNames]] = {
    "gpt_oss": ModuleNames(router="mlp.router"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), ModuleNames(shared="mlp.shared_experts")),
    "bamba": ModuleNames(mlp="feed_forward"),
    "nemotron_h": ModuleNames(
        attention="mixer",
        mamba="mixer",
        mlp="mixer",
        router="mixer.gate",
        experts="mixer.experts",
        shared="mixer.shared_experts",
    ),
    **dict.fromkeys(("gemma4_text", "gemma4"), ModuleNames(router="router.proj", experts="experts", shared="mlp")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueHeads:
    """Key and value heads of layers that differ from the other layers.

    Attributes:
        head_dim: head size of queries and keys, and of values unless the model specifies another.
        keys_as_values: whether values are computed from the key projection, without their own matrix.
    """

    num_kv_heads: HeadCount
    head_dim: Width
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reused:
    """The last layers, if they reuse the keys and values of the last earlier layer of their kind.

    Attributes:
        layers: number of them.
        ffn_size: width of their MLP.
    """

    layers: LayerIndex
    ffn_size: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputs:
    """A second embedding table, with a vector per layer that is added to the residual stream.

    Attributes:
        size: size of a token's vector for one layer.
        vocab_size: rows of the table.
    """

    size: Width
    vocab_size: VocabularySize


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts that replaces the MLP.

    Attributes:
        count: number of experts per layer.
        active: number of experts per token.
        ffn_size: width of an expert, a gated MLP.
        shared_ffn_size: width of the shared expert; 0 if there is none.
        dense_layers: number of first layers with an MLP of the model's `ffn_size` instead.
        latent_size: width of an expert's input and output, if not the hidden size.
    """

    count: ExpertCount
    active: ExpertCount
    ffn_size: Width
    shared_ffn_size: OptionalWidth = 0
    dense_layers: LayerIndex = 0
    latent_size: Width | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA); `head_dim` is the head size of queries and keys.

    Attributes:
        query_rank: rank of the query compression; None: queries are not compressed.
        key_value_rank: rank of the key-value compression.
        rotary_size: rotary part of head_dim, shared by all key heads.
        value_size: head size of values.
    """

    query_rank: Width | None = None
    key_value_rank: Width
    rotary_size: Width
    value_size: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Linear attention with the gated delta rule (GDN).

    Attributes:
        key_heads, value_heads: numbers of heads; the first divides the second.
        key_size, value_size: head sizes.
        kernel_size: width of the short convolution over queries, keys and values.
    """

    key_heads: HeadCount
    value_heads: HeadCount
    key_size: Width
    value_size: Width
    kernel_size: KernelSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """A state-space layer that replaces attention (Mamba-2).

    Attributes:
        heads: number of heads, which split the inner width.
        groups: number of head groups with shared state projections; divides `heads`.
        state_size: state size per channel.
        kernel_size: width of the short convolution.
        chunk_size: chunk size of its kernel, in tokens.
    """

    heads: HeadCount
    head_size: Width
    groups: HeadCount
    state_size: Width
    kernel_size: KernelSize
    chunk_size: TokenCount

    @property
    def width(self) -> int:
        """Inner width."""
        return self.heads * self.head_size

    @property
    def mixed_size(self) -> int:
        """Width of the convolution input."""
        return self.width + 2 * self.groups * self.state_size

    @property
    def projected_size(self) -> int:
        """Width of the input projection: gate, convolution input, and a time step per head."""
        return self.width + self.mixed_size + self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFigures:
    """Shapes of a language model: the block `text` of a description.

    Attributes:
        value_head_dim: head size of values, if not head_dim and attention is not latent.
        ffn_size: width of the gated MLP (three matrices of hidden_size x ffn_size); required if a layer has no experts.
        qkv_bias: whether query, key and value projections have biases.
        qk_norm: whether queries and keys have RMS norms over head_dim.
        attention: attention kinds of the first layers, repeated over all layers.
        window_tokens: window size of `window` layers, including the token itself.
        mlp: MLP kinds of the first layers, repeated over all layers; None: experts, if any, in all but
            `experts.dense_layers`.
        full_heads: key and value heads of `full` layers, if different from `window` layers.
        experts, latent, linear, mamba, reused, layer_inputs: present if layers have them.
    """

    num_layers: LayerCount
    hidden_size: Width
    num_heads: HeadCount
    num_kv_heads: HeadCount
    head_dim: Width
    vocab_size: VocabularySize
    tied_embeddings: bool
    value_head_dim: Width | None = None
    ffn_size: Width | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-6
    attention: tuple[Attention, ...] = ("full",)
    window_tokens: TokenCount | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    linear: Linear | None = None
    mamba: Mamba | None = None
    mlp: tuple[Mlp, ...] | None = None
    full_heads: KeyValueHeads | None = None
    reused: Reused | None = None
    layer_inputs: LayerInputs | None = None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of a layer: its attention and its MLP.

    Attributes:
        attention, mlp: kinds, or `none`.
        reuses: whether it reuses the keys and values of an earlier layer.
    """

    attention: Attention
    mlp: Mlp = "dense"
    reuses: bool = False

    @property
    def has_experts(self) -> bool:
        return self.mlp == "experts"

    @property
    def attends(self) -> bool:
        """Whether it has softmax attention."""
        return self.attention in ("full", "window", "latent")

    @property
    def keeps_state(self) -> bool:
        """Whether a fixed-size state replaces keys and values."""
        return self.attention in ("linear", "mamba")
