"""What a model's figures are: the YAML in `profiles/models`, or a Hugging Face config.json.

Symbols: h = hidden_size, H = num_heads, K = num_kv_heads, D = head_dim, f = ffn_size, V = vocab_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fcp_cli.errors import ProfileError
from fcp_cli.models.descriptions import Figures, find_shipped, read_yaml_mapping
from fcp_cli.models.hf_config import read_hf_config

ARCHITECTURES = ("qwen3", "qwen2", "llama", "qwen3_vl", "internvl")
VISION_KINDS = ("qwen3_vl", "internvit")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """A vision tower with the projector into the language model.

    Attributes:
        kind: `qwen3_vl` (merger and deepstack mergers) or `internvit` (class token, pixel shuffle, MLP projector).
        image_size: side in pixels of the square that the position table covers.
        merge_size: side of the square of patches that becomes one token.
        out_hidden_size: hidden size of the language model that it feeds.
        deepstack_layers: blocks of the tower whose output, through a merger each, feeds early layers of the language
            model; empty where there are none.
    """

    kind: str
    depth: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_size: int
    out_hidden_size: int
    deepstack_layers: tuple[int, ...] = ()

    @property
    def block_parameters(self) -> int:
        """Matrices of the transformer blocks: what a patch is multiplied with, biases and norms left out."""
        return self.depth * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.ffn_size)

    @property
    def encoder_parameters(self) -> int:
        """Embedding, positions and blocks, without what follows them."""
        h, patches = self.hidden_size, (self.image_size // self.patch_size) ** 2
        embedding = 3 * self.temporal_patch_size * self.patch_size**2 * h + h + patches * h
        class_token = 2 * h if self.kind == "internvit" else 0  # the token and its position
        layer_scales = 2 * h if self.kind == "internvit" else 0
        vectors = 4 * h + 4 * h + h + self.ffn_size + layer_scales  # two norms, qkv and out biases, two MLP biases
        return embedding + class_token + self.block_parameters + self.depth * vectors

    @property
    def projector_parameters(self) -> int:
        """Everything between the last block and the language model."""
        merged, out = self.hidden_size * self.merge_size**2, self.out_hidden_size
        if self.kind == "internvit":
            return 2 * merged + (merged + 1) * out + (out + 1) * out
        mlp = (merged + 1) * merged + (merged + 1) * out
        return 2 * self.hidden_size + mlp + len(self.deepstack_layers) * (2 * merged + mlp)

    @property
    def parameters(self) -> int:
        return self.encoder_parameters + self.projector_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A dense decoder-only language model, with a vision tower where it has one.

    Attributes:
        architecture: family in transformers: one of `ARCHITECTURES`.
        ffn_size: width of the gated MLP (three matrices of hidden_size x ffn_size).
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMS norms over head_dim on queries and keys.
        sources: figure, or block of figures, to where it was read.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    vision: VisionSpec | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer_matrix_parameters(self) -> int:
        """Matrices of one layer: every token is multiplied with each of them."""
        projections = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return projections + 3 * self.hidden_size * self.ffn_size

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matrix_parameters + biases + norms

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def text_parameters(self) -> int:
        """Parameters of the language model alone."""
        tables = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.num_layers * self.layer_parameters + tables + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.text_parameters + (self.vision.parameters if self.vision else 0)


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A shipped model by name or alias, or a description by path: YAML, config.json, or the folder that holds one.

    Raises:
        ProfileError: unknown name (the nearest are listed), unreadable file, missing or contradictory figures.
    """
    path = Path(name_or_path)
    if path.is_dir() and (path / "config.json").is_file():
        return load_hf_config(path / "config.json")
    if path.suffix == ".json":
        return load_hf_config(path)
    if path.suffix not in {".yaml", ".yml"}:
        path = find_shipped(str(name_or_path), kind="model")
    return _parse(read_yaml_mapping(path, kind="model"), where=str(path))


def load_hf_config(path: Path) -> ModelSpec:
    """Read a Hugging Face config.json; the language model of a vision model is read from its own block.

    Raises:
        ProfileError: unreadable, not a dense model of a known architecture, or contradictory figures.
    """
    read = read_hf_config(path)
    spec = _text_spec(
        Figures(dict(read.figures), where=str(path)),
        name=read.name,
        architecture=read.architecture,
        sources={"text": str(path)},
    )
    _check(spec, where=str(path))
    return spec


def _parse(document: dict[str, Any], *, where: str) -> ModelSpec:
    top = Figures(document, where=where)
    top.reject_unknown({"format", "name", "aliases", "architecture", "text", "vision", "sources"})
    text = Figures(document.get("text"), where=where, block="text.")
    text.reject_unknown(_TEXT_FIGURES)
    vision = None
    if document.get("vision") is not None:
        vision = _parse_vision(Figures(document["vision"], where=where, block="vision."))
    spec = _text_spec(
        text,
        name=top.text("name"),
        architecture=top.text("architecture"),
        vision=vision,
        aliases=tuple(str(alias) for alias in document.get("aliases") or ()),
        sources={str(key): str(value) for key, value in (document.get("sources") or {}).items()},
    )
    _check(spec, where=where)
    return spec


_TEXT_FIGURES = {
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "tied_embeddings",
    "qkv_bias",
    "qk_norm",
    "rope_theta",
    "norm_eps",
}


def _text_spec(
    figures: Figures,
    *,
    name: str,
    architecture: str,
    sources: Mapping[str, str],
    vision: VisionSpec | None = None,
    aliases: tuple[str, ...] = (),
) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=figures.count("num_layers"),
        hidden_size=figures.count("hidden_size"),
        num_heads=figures.count("num_heads"),
        num_kv_heads=figures.count("num_kv_heads"),
        head_dim=figures.count("head_dim"),
        ffn_size=figures.count("ffn_size"),
        vocab_size=figures.count("vocab_size"),
        tied_embeddings=figures.flag("tied_embeddings"),
        qkv_bias=figures.flag("qkv_bias", default=False),
        qk_norm=figures.flag("qk_norm", default=False),
        rope_theta=figures.number("rope_theta", default=10_000.0),
        norm_eps=figures.number("norm_eps", default=1e-6),
        vision=vision,
        aliases=aliases,
        sources=sources,
    )


def _parse_vision(figures: Figures) -> VisionSpec:
    names = {f.name for f in fields(VisionSpec)}
    figures.reject_unknown(names)
    numbers = {name: figures.count(name) for name in names - {"kind", "deepstack_layers"}}
    return VisionSpec(kind=figures.text("kind"), deepstack_layers=figures.counts("deepstack_layers"), **numbers)


def _check(spec: ModelSpec, *, where: str) -> None:
    """Reject figures that contradict each other, the first one found by name."""
    complaints = [
        (spec.architecture not in ARCHITECTURES, f"architecture {spec.architecture!r} is not one of {ARCHITECTURES}"),
        (
            spec.num_heads % spec.num_kv_heads != 0,
            f"num_kv_heads {spec.num_kv_heads} does not divide num_heads {spec.num_heads}",
        ),
        (spec.head_dim % 2 != 0, f"head_dim {spec.head_dim} is odd; rotary positions need an even one"),
        (spec.hidden_size % 2 != 0, f"hidden_size {spec.hidden_size} is odd"),
        (
            spec.architecture == "llama" and spec.hidden_size % spec.num_heads != 0,
            f"hidden_size {spec.hidden_size} is not divisible by num_heads {spec.num_heads}",
        ),
    ]
    if spec.vision is not None:
        complaints += _vision_complaints(spec, spec.vision)
    for wrong, message in complaints:
        if wrong:
            raise ProfileError(f"{where}: {message}")


def _vision_complaints(spec: ModelSpec, vision: VisionSpec) -> list[tuple[bool, str]]:
    return [
        (vision.kind not in VISION_KINDS, f"vision.kind {vision.kind!r} is not one of {VISION_KINDS}"),
        (
            vision.hidden_size % vision.num_heads != 0,
            f"vision.hidden_size {vision.hidden_size} is not divisible by vision.num_heads {vision.num_heads}",
        ),
        (
            vision.out_hidden_size != spec.hidden_size,
            f"vision.out_hidden_size {vision.out_hidden_size} differs from text.hidden_size {spec.hidden_size}",
        ),
        (
            vision.image_size % vision.patch_size != 0,
            f"vision.image_size {vision.image_size} is not a multiple of vision.patch_size {vision.patch_size}",
        ),
        (
            any(layer >= vision.depth for layer in vision.deepstack_layers),
            f"vision.deepstack_layers {list(vision.deepstack_layers)} has blocks beyond vision.depth {vision.depth}",
        ),
    ]
