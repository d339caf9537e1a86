"""The figures of a language model's layers by their kinds, and what is particular to a family in transformers."""

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
"""Tokens that kernels of linear attention take at once."""

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
# Features of families besides their figures. `fp32 norms` multiply with their weight before they round, `power norms`
# keep the mean of squares besides its root; a `plain mlp` has no gate.
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
    """Names of a layer's modules in transformers."""

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
    """Key and value heads of layers that differ from the others'.

    Attributes:
        head_dim: the head dim of queries and keys, and of values unless the model has one for them.
        keys_as_values: values are made of the keys' product, without a matrix of their own.
    """

    num_kv_heads: HeadCount
    head_dim: Width
    keys_as_values: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reused:
    """Last layers, which attend to the keys and values of the last layer of their kind before them.

    Attributes:
        layers: number of them.
        ffn_size: width of their MLP.
    """

    layers: LayerIndex
    ffn_size: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputs:
    """A second embedding, of which each layer adds its own part to the residual stream.

    Attributes:
        size: the size of a token's embedding for one layer.
        vocab_size: rows of the table.
    """

    size: Width
    vocab_size: VocabularySize


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP.

    Attributes:
        count: experts of a layer.
        active: the active of them, those that a token goes to.
        ffn_size: width of one, a gated MLP.
        shared_ffn_size: width of the shared MLP that every token passes; 0 without one.
        dense_layers: first layers of the model that have an MLP of `ffn_size` instead.
        latent_size: width of an expert's input and output, if it is not the hidden size.
    """

    count: ExpertCount
    active: ExpertCount
    ffn_size: Width
    shared_ffn_size: OptionalWidth = 0
    dense_layers: LayerIndex = 0
    latent_size: Width | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Keys and values that are made of a small vector per token (MLA); `head_dim` is that of queries and keys.

    Attributes:
        query_rank: the query rank of the vector that queries are made of; None: of the hidden state itself.
        key_value_rank: the key value rank of the vector that keys and values are made of.
        rotary_size: rotated part of head_dim; all heads share it in the keys.
        value_size: the size of a value's head.
    """

    query_rank: Width | None = None
    key_value_rank: Width
    rotary_size: Width
    value_size: Width


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Attention by a state of fixed size that the gated delta rule updates (GDN).

    Attributes:
        key_heads, value_heads: the first divides the second.
        key_size, value_size: the sizes of a head's keys and values.
        kernel_size: tokens of the short convolution over queries, keys and values.
    """

    key_heads: HeadCount
    value_heads: HeadCount
    key_size: Width
    value_size: Width
    kernel_size: KernelSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """A state space of fixed size in place of attention (Mamba-2).

    Attributes:
        heads: the heads that split the layer's inner width.
        groups: the groups of heads that share the projections to and from the states; divides `heads`.
        state_size: numbers of the state for each of a head's.
        kernel_size: tokens of the short convolution before it.
        chunk_size: tokens that its kernel takes at once.
    """

    heads: HeadCount
    head_size: Width
    groups: HeadCount
    state_size: Width
    kernel_size: KernelSize
    chunk_size: TokenCount

    @property
    def width(self) -> int:
        """Width of the input and output of the states."""
        return self.heads * self.head_size

    @property
    def mixed_size(self) -> int:
        """Width of the convolution's input."""
        return self.width + 2 * self.groups * self.state_size

    @property
    def projected_size(self) -> int:
        """Width of the input projection: a gate, the convolution's input, and a time step per head."""
        return self.width + self.mixed_size + self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFigures:
    """The shapes of a language model, as the block `text` of a description gives them.

    Attributes:
        value_head_dim: size of a value's head, if it is not head_dim and attention is not latent.
        ffn_size: width of the gated MLP (three matrices of hidden_size x ffn_size); given where a layer has no experts.
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMS norms over head_dim on queries and keys.
        attention: the kinds of the first layers, repeated over all: `full`, `window`, `latent`, `linear`, `mamba` or
            `none`.
        window_tokens: how many tokens a token of a `window` layer attends to, itself among them.
        mlp: the kinds of the first layers' MLPs, repeated over all: `dense`, `experts` or `none`; None: experts in all
            layers but `experts.dense_layers`, if there are any.
        full_heads: the heads of `full` layers, if they differ from those of windows.
        experts, latent, linear, mamba, reused, layer_inputs: given if layers have them.
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
        attention, mlp: `none` without one.
        reuses: it attends to the keys and values of an earlier layer.
    """

    attention: Attention
    mlp: Mlp = "dense"
    reuses: bool = False

    @property
    def has_experts(self) -> bool:
        return self.mlp == "experts"

    @property
    def attends(self) -> bool:
        """Whether queries meet keys and values."""
        return self.attention in ("full", "window", "latent")

    @property
    def keeps_state(self) -> bool:
        """Whether tokens see the past through a state of fixed size instead of keys and values."""
        return self.attention in ("linear", "mamba")
