"""The layers of a language model: their kinds, and the matrices of each kind by the names that transformers gives them.

Whatever is said of a model's layers (parameters, operations, memory, adapters) is a sum over kinds: nothing else here
knows of families. Symbols: h = hidden_size, H = num_heads, K = num_kv_heads, D = head_dim, f = ffn_size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
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
]
Attention: TypeAlias = Literal["full", "window", "latent", "linear", "mamba"]

LINEAR_CHUNK: Final = 64
"""Tokens that kernels of linear attention take at once."""

Trait: TypeAlias = Literal[
    "fp32 norms",
    "four norms",
    "output bias",
    "sinks",
    "expert biases",
    "query gate",
    "shared gate",
    "sigmoid router",
    "16-bit router",
    "wide qk norm",
    "split linear inputs",
]
# Features of families besides their figures. `fp32 norms` multiply with their weight before they round.
_TRAITS: Final[Mapping[Architecture, frozenset[Trait]]] = {
    "gemma3_text": frozenset({"fp32 norms", "four norms"}),
    "gemma3": frozenset({"fp32 norms", "four norms"}),
    "gpt_oss": frozenset({"fp32 norms", "output bias", "sinks", "expert biases"}),
    "deepseek_v3": frozenset({"sigmoid router"}),
    "glm4_moe": frozenset({"sigmoid router"}),
    "glm4_moe_lite": frozenset({"sigmoid router"}),
    "minimax_m2": frozenset({"sigmoid router", "16-bit router", "wide qk norm"}),
    "qwen3_next": frozenset({"fp32 norms", "query gate", "shared gate"}),
    "qwen3_5": frozenset({"fp32 norms", "query gate", "split linear inputs"}),
    "qwen3_5_moe": frozenset({"fp32 norms", "query gate", "shared gate", "split linear inputs"}),
}
_NAMES_OF_EXPERTS: Final[Mapping[Architecture, tuple[str, str]]] = {
    "gpt_oss": ("router", "shared_expert"),
    "deepseek_v3": ("gate", "shared_experts"),
    "glm4_moe": ("gate", "shared_experts"),
    "glm4_moe_lite": ("gate", "shared_experts"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP.

    Attributes:
        count: experts of a layer.
        active: of them, those that a token goes to.
        ffn_size: width of one, a gated MLP.
        shared_ffn_size: width of the shared MLP that every token passes; 0 without one.
        dense_layers: first layers of the model that have an MLP of `ffn_size` instead.
    """

    count: ExpertCount
    active: ExpertCount
    ffn_size: Width
    shared_ffn_size: OptionalWidth = 0
    dense_layers: LayerIndex = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Keys and values that are made of a small vector per token (MLA); `head_dim` is that of queries and keys.

    Attributes:
        query_rank: of the vector that queries are made of; None: of the hidden state itself.
        key_value_rank: of the vector that keys and values are made of.
        rotary_size: rotated part of head_dim; all heads share it in the keys.
        value_size: of a value's head.
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
        key_size, value_size: of a head.
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
        heads: that split the layer's inner width.
        head_size: of one.
        groups: of heads that share the projections to and from the states; divides `heads`.
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
        ffn_size: width of the gated MLP (three matrices of hidden_size x ffn_size); given where a layer has no experts.
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMS norms over head_dim on queries and keys.
        attention: of the first layers, repeated over all: `full`, `window`, `latent`, `linear` or `mamba`.
        window_tokens: that a token of a `window` layer attends to, itself among them.
        experts, latent, linear, mamba: given where layers have them.
    """

    num_layers: LayerCount
    hidden_size: Width
    num_heads: HeadCount
    num_kv_heads: HeadCount
    head_dim: Width
    vocab_size: VocabularySize
    tied_embeddings: bool
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


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of a layer: its attention, and whether it has experts."""

    attention: Attention
    has_experts: bool = False

    @property
    def keeps_state(self) -> bool:
        """Whether tokens see the past through a state of fixed size instead of keys and values."""
        return self.attention in ("linear", "mamba")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, or as many as there are experts.

    Attributes:
        ends: widths of input and output.
        copies: of the matrix, one for each expert.
        active: of them, those that a token is multiplied with.
        is_linear: a linear layer of PyTorch, which can take adapters.
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
    """The decoder of a model: its figures, its family in transformers, and properties that follow from both."""

    architecture: Architecture

    def has(self, trait: Trait) -> bool:
        """Return whether the family has a feature."""
        return trait in _TRAITS.get(self.architecture, frozenset())

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in their order."""
        dense = self.num_layers if self.experts is None else self.experts.dense_layers
        return _kinds_of_layers(self.num_layers, self.attention, dense)

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """The kinds of layers, with how many there are of each."""
        return dict(Counter(self.layer_kinds))

    @property
    def key_size(self) -> int:
        """Elements of the keys that a token has in a layer that attends by softmax."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Elements of the values that a token has in a layer that attends by softmax."""
        return self.num_kv_heads * (self.head_dim if self.latent is None else self.latent.value_size)

    @property
    def dense_width(self) -> int:
        """The width of the MLP of layers without experts, of a model that has such layers."""
        assert self.ffn_size is not None, "a description with layers without experts has their width"
        return self.ffn_size

    @property
    def latent_figures(self) -> Latent:
        """The figures of latent attention, of a model that has such layers."""
        assert self.latent is not None, "a description that names a kind of layer has its figures"
        return self.latent

    @property
    def linear_figures(self) -> Linear:
        """The figures of linear attention, of a model that has such layers."""
        assert self.linear is not None, "a description that names a kind of layer has its figures"
        return self.linear

    @property
    def mamba_figures(self) -> Mamba:
        """The figures of state spaces, of a model that has such layers."""
        assert self.mamba is not None, "a description that names a kind of layer has its figures"
        return self.mamba

    @property
    def ring_layers(self) -> int:
        """Layers whose keys and values go round a ring; others pass on a state or the tokens of a window."""
        return sum(kind.attention in ("full", "latent") for kind in self.layer_kinds)

    @property
    def window_layers(self) -> int:
        """Layers of whose keys and values the rows before each chunk travel alone."""
        return sum(kind.attention == "window" for kind in self.layer_kinds)

    @property
    def layer_period(self) -> int:
        """Layers after which their kinds repeat; 1 where all are alike, or they do not repeat from the first on."""
        kinds = self.layer_kinds
        periods = range(1, min(len(self.attention), self.num_layers // 2) + 1)
        found = (period for period in periods if kinds == (kinds[:period] * len(kinds))[: len(kinds)])
        return next(found, 1)

    def matrices(self, kind: LayerKind) -> dict[str, Matrix]:
        """Return the matrices of a layer of a kind by their names below it."""
        return _ATTENTION_MATRICES[kind.attention](self) | _mlp_matrices(self, kind)

    def layer_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of a layer of a kind: matrices, biases and norms."""
        return sum(matrix.parameters for matrix in self.matrices(kind).values()) + _vectors(self, kind)

    def active_layer_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of the matrices of such a layer that a token is multiplied with."""
        return sum(matrix.active_parameters for matrix in self.matrices(kind).values())

    def layer_linear_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of such a layer that linear layers of PyTorch and routers multiply with."""
        return self.active_layer_parameters(kind) - sum(
            matrix.active_parameters for matrix in self.matrices(kind).values() if matrix.copies > 1
        )

    @property
    def layers_parameters(self) -> int:
        """Parameters of all layers."""
        return sum(count * self.layer_parameters(kind) for kind, count in self.kinds.items())

    @property
    def largest_layer_parameters(self) -> int:
        return max(self.layer_parameters(kind) for kind in self.kinds)

    @property
    def largest_mlp_matrix_parameters(self) -> int:
        """Parameters of the largest tensor of an MLP, in which matrices of all experts are one."""
        return max(matrix.parameters for kind in self.kinds for matrix in _mlp_matrices(self, kind).values())

    def layer_expert_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of a layer's experts, which ranks of expert parallelism share out."""
        return sum(matrix.parameters for matrix in self.matrices(kind).values() if matrix.copies > 1)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return sum(count * self.layer_expert_parameters(kind) for kind, count in self.kinds.items())

    @property
    def matrix_parameters(self) -> int:
        """Parameters that every token is multiplied with: of the layers' matrices, and the output layer."""
        layers = sum(count * self.active_layer_parameters(kind) for kind, count in self.kinds.items())
        return layers + self.embedding_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def text_parameters(self) -> int:
        """Parameters of the language model alone."""
        # A tied table serves input and output; the last term is the final norm.
        tables = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers_parameters + tables + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Parameters of the language model that a token meets, of all experts those that it goes to."""
        experts = self.experts
        idle = 0 if experts is None else self.expert_parameters * (experts.count - experts.active) // experts.count
        return self.text_parameters - idle


@cache  # asked for again and again while recipes are tried
def _kinds_of_layers(layers: int, attention: tuple[Attention, ...], dense: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(attention[layer % len(attention)], layer >= dense) for layer in range(layers))


def _softmax_matrices(spec: LanguageModel) -> dict[str, Matrix]:
    h, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    return {
        "self_attn.q_proj": Matrix((h, queries * (2 if spec.has("query gate") else 1))),
        "self_attn.k_proj": Matrix((h, spec.key_size)),
        "self_attn.v_proj": Matrix((h, spec.value_size)),
        "self_attn.o_proj": Matrix((queries, h)),
    }


def _latent_matrices(spec: LanguageModel) -> dict[str, Matrix]:
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


def _linear_matrices(spec: LanguageModel) -> dict[str, Matrix]:
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
        # A depthwise convolution: one kernel per channel.
        "linear_attn.conv1d": Matrix((linear.kernel_size, 2 * keys + values), is_linear=False),
        "linear_attn.out_proj": Matrix((values, h)),
    }


def _mamba_matrices(spec: LanguageModel) -> dict[str, Matrix]:
    h, mamba = spec.hidden_size, spec.mamba_figures
    return {
        "mamba.in_proj": Matrix((h, mamba.projected_size)),
        "mamba.conv1d": Matrix((mamba.kernel_size, mamba.mixed_size), is_linear=False),
        "mamba.out_proj": Matrix((mamba.width, h)),
    }


_ATTENTION_MATRICES: Final = {
    "full": _softmax_matrices,
    "window": _softmax_matrices,
    "latent": _latent_matrices,
    "linear": _linear_matrices,
    "mamba": _mamba_matrices,
}


def _gated_mlp(prefix: str, hidden_size: int, width: int) -> dict[str, Matrix]:
    up, down = Matrix((hidden_size, width)), Matrix((width, hidden_size))
    return {f"{prefix}.gate_proj": up, f"{prefix}.up_proj": up, f"{prefix}.down_proj": down}


def _mlp_matrices(spec: LanguageModel, kind: LayerKind) -> dict[str, Matrix]:
    h, experts = spec.hidden_size, spec.experts
    if experts is None or not kind.has_experts:
        return _gated_mlp("feed_forward" if spec.architecture == "bamba" else "mlp", h, spec.dense_width)
    router, shared = _NAMES_OF_EXPERTS.get(spec.architecture, ("gate", "shared_expert"))
    found = {
        f"mlp.{router}": Matrix((h, experts.count), is_linear=False),
        "mlp.experts.gate_up_proj": Matrix((h, 2 * experts.ffn_size), experts.count, experts.active, is_linear=False),
        "mlp.experts.down_proj": Matrix((experts.ffn_size, h), experts.count, experts.active, is_linear=False),
    }
    if experts.shared_ffn_size:
        found |= _gated_mlp(f"mlp.{shared}", h, experts.shared_ffn_size)
    return found | ({"mlp.shared_expert_gate": Matrix((h, 1))} if spec.has("shared gate") else {})


def _vectors(spec: LanguageModel, kind: LayerKind) -> int:
    """Count the parameters of a layer outside of matrices: norms, biases, and attention's own vectors."""
    found = (4 if spec.has("four norms") else 2) * spec.hidden_size
    found += _VECTORS[kind.attention](spec) if kind.keeps_state else _softmax_vectors(spec, kind.attention)
    experts = spec.experts
    if kind.has_experts and experts is not None and spec.has("expert biases"):
        found += experts.count * (1 + 2 * experts.ffn_size + spec.hidden_size)  # the router's, too
    return found


def _linear_vectors(spec: LanguageModel) -> int:
    linear = spec.linear_figures
    return 2 * linear.value_heads + linear.value_size  # decay and its bias, and a norm over a head


def _mamba_vectors(spec: LanguageModel) -> int:
    mamba = spec.mamba_figures
    # The convolution's bias, decay, time step, skip connection, and a norm.
    return mamba.mixed_size + 3 * mamba.heads + mamba.width


_VECTORS: Final[Mapping[Attention, Callable[[LanguageModel], int]]] = {
    "linear": _linear_vectors,
    "mamba": _mamba_vectors,
}


def _softmax_vectors(spec: LanguageModel, attention: Attention) -> int:
    if attention == "latent":
        latent = spec.latent_figures
        norms = (latent.query_rank or 0) + latent.key_value_rank
        biases = norms + latent.rotary_size + spec.hidden_size
        return norms + (biases if spec.qkv_bias else 0)
    biases = spec.num_heads * spec.head_dim + spec.key_size + spec.value_size if spec.qkv_bias else 0
    biases += spec.hidden_size if spec.has("output bias") else 0
    heads = (spec.num_heads, spec.num_kv_heads) if spec.has("wide qk norm") else (1, 1)
    norms = sum(heads) * spec.head_dim if spec.qk_norm else 0
    return biases + norms + (spec.num_heads if spec.has("sinks") else 0)
