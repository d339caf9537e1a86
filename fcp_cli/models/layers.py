"""Layers of a language model: their kinds, and the matrices of each kind under their transformers names.

Parameters, operations, memory and adapters are sums over kinds, so that no other module needs to know families.
Symbols: h = hidden_size, H = num_heads, K = num_kv_heads, D = head_dim, f = ffn_size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from fcp_cli.util.options import MOST_PIXELS
from fcp_cli.util.validation import Positive

# Shapes of a language model's layers by kind, and traits of families in transformers.

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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, or the matrices of all experts.

    Attributes:
        ends: input and output width.
        copies: number of copies, one per expert.
        active: number of copies used per token.
        is_linear: whether it is an `nn.Linear`, which can have adapters.
    """

    ends: tuple[int, int]
    copies: int = 1
    active: int = 1
    is_linear: bool = True

    @property
    def parameters(self) -> int:
        return self.copies * self.ends[0] * self.ends[1]

    @property
    def active_parameters(self) -> int:
        return self.active * self.ends[0] * self.ends[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel(TextFigures):
    """Decoder of a model: its shapes, its family in transformers, and derived properties."""

    architecture: Architecture

    def has(self, trait: Trait) -> bool:
        """Return whether the family has a trait."""
        return trait in TRAITS.get(self.architecture, frozenset())

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order."""
        return _kinds_of_layers(*self._kind_figures)

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """Number of layers of each kind."""
        return dict(_counted_kinds(*self._kind_figures))

    @property
    def _kind_figures(self) -> tuple[int, tuple[Attention, ...], tuple[Mlp, ...] | None, int, int]:
        dense = self.num_layers if self.experts is None else self.experts.dense_layers
        reused = 0 if self.reused is None else self.reused.layers
        return self.num_layers, self.attention, self.mlp, dense, reused

    def heads(self, kind: LayerKind) -> KeyValueHeads:
        """Return the key and value heads of a softmax-attention layer."""
        if kind.attention == "full" and self.full_heads is not None:
            return self.full_heads
        return KeyValueHeads(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def value_dim(self, kind: LayerKind) -> int:
        """Return the head size of values in a layer of this kind."""
        if self.latent is not None:
            return self.latent.value_size
        return self.value_head_dim or self.heads(kind).head_dim

    def query_size(self, kind: LayerKind) -> int:
        """Return the query elements per token in a layer of this kind."""
        return self.num_heads * self.heads(kind).head_dim

    def key_size(self, kind: LayerKind) -> int:
        """Return the key elements per token in a layer of this kind."""
        return self.heads(kind).num_kv_heads * self.heads(kind).head_dim

    def value_size(self, kind: LayerKind) -> int:
        """Return the value elements per token in a layer of this kind."""
        return self.heads(kind).num_kv_heads * self.value_dim(kind)

    def key_value_elements(self, *attention: Attention) -> int:
        """Return the key and value elements per token, summed over layers with these attention kinds."""
        return sum(
            count * (self.key_size(kind) + self.value_size(kind))
            for kind, count in self.kinds.items()
            if kind.attention in attention
        )

    def hop_elements(self, tensor_parallel: int) -> int:
        """Return the maximum key and value elements per token in a ring message."""
        return max(
            max(1, heads.num_kv_heads // tensor_parallel) * (heads.head_dim + self.value_dim(kind))
            for kind in self.kinds
            if kind.attends
            for heads in [self.heads(kind)]
        )

    def query_elements(self, *attention: Attention) -> int:
        """Return the query and output elements per token, summed over layers with these attention kinds."""
        return sum(
            count * self.num_heads * (self.heads(kind).head_dim + self.value_dim(kind))
            for kind, count in self.kinds.items()
            if kind.attention in attention
        )

    @property
    def shared_kv_heads(self) -> int:
        """Maximum number of ranks that can split the key and value heads of every layer."""
        heads = [self.heads(kind).num_kv_heads for kind in self.kinds if kind.attends]
        return math.gcd(*heads) if heads else self.num_kv_heads

    def dense_width(self, kind: LayerKind) -> int:
        """Return the MLP width of a layer without experts."""
        if kind.reuses and self.reused is not None:
            return self.reused.ffn_size
        assert self.ffn_size is not None, "a description with layers without experts has their width"
        return self.ffn_size

    @property
    def latent_figures(self) -> Latent:
        """Shapes of latent attention; the model must have such layers."""
        assert self.latent is not None, "a description that names a kind of layer has its figures"
        return self.latent

    @property
    def linear_figures(self) -> Linear:
        """Shapes of linear attention; the model must have such layers."""
        assert self.linear is not None, "a description that names a kind of layer has its figures"
        return self.linear

    @property
    def mamba_figures(self) -> Mamba:
        """Shapes of state-space layers; the model must have such layers."""
        assert self.mamba is not None, "a description that names a kind of layer has its figures"
        return self.mamba

    @property
    def ring_layers(self) -> int:
        """Number of layers whose keys and values pass around a ring."""
        return sum(kind.attention in ("full", "latent") for kind in self.layer_kinds)

    @property
    def window_layers(self) -> int:
        """Number of layers that exchange only the halo before each chunk."""
        return sum(kind.attention == "window" for kind in self.layer_kinds)

    @property
    def state_layers(self) -> int:
        """Number of layers that pass a state between chunks."""
        return sum(kind.keeps_state for kind in self.layer_kinds)

    @property
    def layer_period(self) -> int:
        """Period of layer kinds; 1 if all are equal or there is no period."""
        kinds = self.layer_kinds
        periods = range(1, min(max(len(self.attention), len(self.mlp or ())), self.num_layers // 2) + 1)
        found = (period for period in periods if kinds == (kinds[:period] * len(kinds))[: len(kinds)])
        return next(found, 1)

    @cache  # noqa: B019 - there are few specs, and a recipe search asks for their matrices thousands of times
    def matrices(self, kind: LayerKind) -> Mapping[str, Matrix]:
        """Return the matrices of a layer, by module name in the layer."""
        return _ATTENTION_MATRICES[kind.attention](self, kind) | _mlp_matrices(self, kind) | _layer_input_matrices(self)

    def layer_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of a layer: matrices, biases and norms."""
        return sum(matrix.parameters for matrix in self.matrices(kind).values()) + _vectors(self, kind)

    def active_layer_parameters(self, kind: LayerKind) -> int:
        """Return the matrix parameters of a layer used per token."""
        return sum(matrix.active_parameters for matrix in self.matrices(kind).values())

    def layer_linear_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of a layer in `nn.Linear` modules and routers, without experts."""
        return self.active_layer_parameters(kind) - sum(
            matrix.active_parameters for matrix in self.matrices(kind).values() if matrix.copies > 1
        )

    @property
    def layers_parameters(self) -> int:
        """Parameters of all layers."""
        return sum(count * self.layer_parameters(kind) for kind, count in self.kinds.items())

    @property
    def largest_mlp_matrix_parameters(self) -> int:
        """Parameters of the largest MLP tensor; all experts' matrices form a single tensor."""
        matrices = (matrix for kind in self.kinds for matrix in _mlp_matrices(self, kind).values())
        return max((matrix.parameters for matrix in matrices), default=0)

    def layer_expert_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of a layer's experts, which expert parallelism shards."""
        return sum(matrix.parameters for matrix in self.matrices(kind).values() if matrix.copies > 1)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return sum(count * self.layer_expert_parameters(kind) for kind, count in self.kinds.items())

    @property
    def matrix_parameters(self) -> int:
        """Matrix parameters used per token, including the output layer."""
        layers = sum(count * self.active_layer_parameters(kind) for kind, count in self.kinds.items())
        return layers + self.embedding_parameters + self.layer_input_parameters[1]

    @property
    def layer_input_parameters(self) -> tuple[int, int]:
        """Parameters of the per-layer embedding table, and of the matrix that projects into it."""
        if self.layer_inputs is None:
            return 0, 0
        width = self.num_layers * self.layer_inputs.size
        return self.layer_inputs.vocab_size * width, self.hidden_size * width

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def text_parameters(self) -> int:
        """Parameters of the language model without the vision encoder."""
        # A tied table is shared by input and output.
        tables = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers_parameters + tables + self.root_vectors + sum(self.layer_input_parameters)

    @property
    def root_vectors(self) -> int:
        """Parameters of norms outside the layers."""
        return self.hidden_size + (0 if self.layer_inputs is None else self.layer_inputs.size)

    @property
    def active_parameters(self) -> int:
        """Language model parameters used per token: of experts, only the active ones."""
        experts = self.experts
        idle = 0 if experts is None else self.expert_parameters * (experts.count - experts.active) // experts.count
        return self.text_parameters - idle


@cache  # a recipe search calls it repeatedly
def _kinds_of_layers(
    layers: int, attention: tuple[Attention, ...], mlp: tuple[Mlp, ...] | None, dense: int, reused: int
) -> tuple[LayerKind, ...]:
    def mlp_of(layer: int) -> Mlp:
        return mlp[layer % len(mlp)] if mlp else "experts" if layer >= dense else "dense"

    return tuple(
        LayerKind(attention[layer % len(attention)], mlp_of(layer), layer >= layers - reused) for layer in range(layers)
    )


@cache
def _counted_kinds(*figures: Any) -> Mapping[LayerKind, int]:
    return Counter(_kinds_of_layers(*figures))


def _names(spec: LanguageModel) -> ModuleNames:
    return NAMES.get(spec.architecture, ModuleNames())


def _no_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    return {}


def _softmax_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, queries, name = spec.hidden_size, spec.query_size(kind), _names(spec).attention
    found = {
        f"{name}.q_proj": Matrix((h, queries * (2 if spec.has("query gate") else 1))),
        f"{name}.k_proj": Matrix((h, spec.key_size(kind))),
        f"{name}.v_proj": Matrix((h, spec.value_size(kind))),
        f"{name}.o_proj": Matrix((spec.num_heads * spec.value_dim(kind), h)),
    }
    missing = ("k_proj", "v_proj") if kind.reuses else ("v_proj",) if spec.heads(kind).keys_as_values else ()
    return {key: matrix for key, matrix in found.items() if not key.endswith(missing)}


def _latent_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, queries, latent = spec.hidden_size, spec.num_heads * spec.head_dim, spec.latent_figures
    to_queries = {"self_attn.q_proj": Matrix((h, queries))}
    if latent.query_rank is not None:
        to_queries = {
            "self_attn.q_a_proj": Matrix((h, latent.query_rank)),
            "self_attn.q_b_proj": Matrix((latent.query_rank, queries)),
        }
    made = spec.num_heads * (spec.head_dim - latent.rotary_size + latent.value_size)
    return to_queries | {
        "self_attn.kv_a_proj_with_mqa": Matrix((h, latent.key_value_rank + latent.rotary_size)),
        "self_attn.kv_b_proj": Matrix((latent.key_value_rank, made)),
        "self_attn.o_proj": Matrix((spec.num_heads * latent.value_size, h)),
    }


def _linear_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, linear = spec.hidden_size, spec.linear_figures
    keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
    inputs = {
        "linear_attn.in_proj_qkvz": Matrix((h, 2 * keys + 2 * values)),
        "linear_attn.in_proj_ba": Matrix((h, 2 * linear.value_heads)),
    }
    if spec.has("split linear inputs"):
        inputs = {
            "linear_attn.in_proj_qkv": Matrix((h, 2 * keys + values)),
            "linear_attn.in_proj_z": Matrix((h, values)),
            "linear_attn.in_proj_b": Matrix((h, linear.value_heads)),
            "linear_attn.in_proj_a": Matrix((h, linear.value_heads)),
        }
    return inputs | {
        # A depthwise convolution: a kernel per channel.
        "linear_attn.conv1d": Matrix((linear.kernel_size, 2 * keys + values), is_linear=False),
        "linear_attn.out_proj": Matrix((values, h)),
    }


def _mamba_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, mamba, name = spec.hidden_size, spec.mamba_figures, _names(spec).mamba
    return {
        f"{name}.in_proj": Matrix((h, mamba.projected_size)),
        f"{name}.conv1d": Matrix((mamba.kernel_size, mamba.mixed_size), is_linear=False),
        f"{name}.out_proj": Matrix((mamba.width, h)),
    }


_ATTENTION_MATRICES: Final = {
    "full": _softmax_matrices,
    "window": _softmax_matrices,
    "latent": _latent_matrices,
    "linear": _linear_matrices,
    "mamba": _mamba_matrices,
    "none": _no_matrices,
}


def _mlp(spec: LanguageModel, name: str, width: int) -> dict[str, Matrix]:
    up, down = Matrix((spec.hidden_size, width)), Matrix((width, spec.hidden_size))
    gate = {} if spec.has("plain mlp") else {f"{name}.gate_proj": up}
    return gate | {f"{name}.up_proj": up, f"{name}.down_proj": down}


def _mlp_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, experts, names = spec.hidden_size, spec.experts, _names(spec)
    if experts is None or not kind.has_experts:
        return {} if kind.mlp == "none" else _mlp(spec, names.mlp, spec.dense_width(kind))
    is_plain, wide = spec.has("plain mlp"), experts.latent_size or h
    first, inner = ("up_proj", 1) if is_plain else ("gate_up_proj", 2)
    each: dict[str, Any] = {"copies": experts.count, "active": experts.active, "is_linear": False}
    found = {
        names.router: Matrix((h, experts.count), is_linear=spec.has("norms of experts")),
        f"{names.experts}.{first}": Matrix((wide, inner * experts.ffn_size), **each),
        f"{names.experts}.down_proj": Matrix((experts.ffn_size, wide), **each),
    }
    if experts.latent_size is not None:
        found |= {f"{names.mlp}.fc1_latent_proj": Matrix((h, wide)), f"{names.mlp}.fc2_latent_proj": Matrix((wide, h))}
    if experts.shared_ffn_size:
        found |= _mlp(spec, names.shared, experts.shared_ffn_size)
    return found | ({"mlp.shared_expert_gate": Matrix((h, 1))} if spec.has("shared gate") else {})


def _layer_input_matrices(spec: LanguageModel) -> dict[str, Matrix]:
    if spec.layer_inputs is None:
        return {}
    h, size = spec.hidden_size, spec.layer_inputs.size
    return {"per_layer_input_gate": Matrix((h, size)), "per_layer_projection": Matrix((size, h))}


def _vectors(spec: LanguageModel, kind: LayerKind) -> int:
    """Count a layer's parameters outside matrices: norms, biases and attention vectors."""
    halves = (kind.attention != "none") + (kind.mlp != "none")
    norms = halves * (2 if spec.has("four norms") else 1) + (spec.layer_inputs is not None)
    found = norms * spec.hidden_size
    if kind.attention != "none":
        found += _VECTORS[kind.attention](spec) if kind.keeps_state else _softmax_vectors(spec, kind)
    experts = spec.experts
    if kind.has_experts and experts is not None:
        if spec.has("expert biases"):
            found += experts.count * (1 + 2 * experts.ffn_size + spec.hidden_size)  # including the router's bias
        if spec.has("norms of experts"):  # three norms, the router's input scale, and a scale per expert
            found += 4 * spec.hidden_size + experts.count
    return found


def _linear_vectors(spec: LanguageModel) -> int:
    linear = spec.linear_figures
    return 2 * linear.value_heads + linear.value_size  # decay, its bias, and a norm per head


def _mamba_vectors(spec: LanguageModel) -> int:
    mamba = spec.mamba_figures
    # Convolution bias, decay, time step, skip connection, and a norm.
    return mamba.mixed_size + 3 * mamba.heads + mamba.width


_VECTORS: Final[Mapping[Attention, Callable[[LanguageModel], int]]] = {
    "linear": _linear_vectors,
    "mamba": _mamba_vectors,
}


def _softmax_vectors(spec: LanguageModel, kind: LayerKind) -> int:
    if kind.attention == "latent":
        latent = spec.latent_figures
        norms = (latent.query_rank or 0) + latent.key_value_rank
        biases = norms + latent.rotary_size + spec.hidden_size
        return norms + (biases if spec.qkv_bias else 0)
    own = 0 if kind.reuses else 1  # keys and values
    biases = spec.query_size(kind) + own * (spec.key_size(kind) + spec.value_size(kind)) if spec.qkv_bias else 0
    biases += spec.hidden_size if spec.has("output bias") else 0
    heads = (spec.num_heads, spec.heads(kind).num_kv_heads) if spec.has("wide qk norm") else (1, own)
    norms = sum(heads) * spec.heads(kind).head_dim if spec.qk_norm else 0
    has_sinks = spec.has("sinks") or (spec.has("window sinks") and kind.attention == "window")
    return biases + norms + (spec.num_heads if has_sinks else 0)


# Number types of model descriptions, with upper limits.
#
# Limits are well above published models, and low enough that per-layer lists and products of sizes stay small.

MOST_LAYERS: Final = 10_000  # lists have an entry per layer; the deepest published model has 126
_MOST_WIDTH: Final = 1 << 20  # of a vector per token; the widest MLP of Llama 3.1 405B has 53,248
_MOST_HEADS: Final = 1 << 16  # DeepSeek-V3 has 128 of attention, state spaces have some hundreds
_MOST_EXPERTS: Final = 1 << 16  # of a layer; Kimi K2 has 384
_MOST_WORDS: Final = 1 << 24  # Gemma has 262,144
_MOST_TOKENS: Final = (1 << 31) - 1  # a plan holds lengths in 32 bits
_MOST_TAPS: Final = 1 << 10  # of a short convolution; published ones have 4

_COUNT: Final = "a whole number of at least 1"
LayerCount = Annotated[int, Meta(ge=1, le=MOST_LAYERS, description=_COUNT)]
LayerIndex = Annotated[int, Meta(ge=0, le=MOST_LAYERS, description="a whole number of at least 0")]
Width = Annotated[int, Meta(ge=1, le=_MOST_WIDTH, description=_COUNT)]
OptionalWidth = Annotated[int, Meta(ge=0, le=_MOST_WIDTH, description="a whole number of at least 0")]
HeadCount = Annotated[int, Meta(ge=1, le=_MOST_HEADS, description=_COUNT)]
ExpertCount = Annotated[int, Meta(ge=1, le=_MOST_EXPERTS, description=_COUNT)]
VocabularySize = Annotated[int, Meta(ge=1, le=_MOST_WORDS, description=_COUNT)]
TokenCount = Annotated[int, Meta(ge=1, le=_MOST_TOKENS, description=_COUNT)]
KernelSize = Annotated[int, Meta(ge=1, le=_MOST_TAPS, description=_COUNT)]
PixelCount = Annotated[int, Meta(ge=1, le=MOST_PIXELS, description=_COUNT)]
