"""Model descriptions from YAML in `profiles/models` or a Hugging Face config.json, and their operations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.errors import ProfileError
from fcp_cli.models.checkpoint_config import read_hf_config
from fcp_cli.models.layers import (
    LINEAR_CHUNK,
    Architecture,
    Attention,
    HeadCount,
    KernelSize,
    KeyValueHeads,
    LanguageModel,
    LayerCount,
    LayerIndex,
    PixelCount,
    TextFigures,
    Width,
)
from fcp_cli.util.files import shipped
from fcp_cli.util.inputs import parse_yaml, read_text
from fcp_cli.util.validation import NonEmptyText, fields_of, validated
from fcp_cli.util.words import nearest_words


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """A vision tower and its projector into the language model.

    Attributes:
        kind: `qwen3_vl` (merger and deepstack mergers), `qwen2_5_vl` (gated MLPs, attention in windows, merger),
            `internvit` (class token, pixel shuffle, MLP projector), `siglip` (patch pooling, norm, matrix) or `gemma4`
            (blocks of Gemma 4's language model, patch pooling, matrix).
        image_size: side in pixels of the square covered by the position table; None without a table.
        axis_positions: rows of the position table per axis, for encoders with a table per axis.
        merge_size: side of the square of patches merged into a token.
        out_hidden_size: hidden size of the language model.
        deepstack_layers: tower blocks whose outputs feed early language model layers, each through a merger.
        window_size: side in pixels of attention windows in most blocks; None if all blocks attend to the full image or
            frame.
        full_attention_layers: blocks that attend to the full image or frame if others have windows.
    """

    kind: Literal["qwen3_vl", "qwen2_5_vl", "internvit", "siglip", "gemma4"]
    depth: LayerCount
    hidden_size: Width
    num_heads: HeadCount
    ffn_size: Width
    patch_size: PixelCount
    temporal_patch_size: KernelSize
    merge_size: KernelSize
    out_hidden_size: Width
    image_size: PixelCount | None = None
    axis_positions: Width | None = None
    deepstack_layers: tuple[LayerIndex, ...] = ()
    window_size: PixelCount | None = None
    full_attention_layers: tuple[LayerIndex, ...] = ()

    @property
    def has_gated_mlp(self) -> bool:
        return self.kind in ("qwen2_5_vl", "gemma4")

    @property
    def block_parameters(self) -> int:
        """Parameters of the blocks' matrices, without biases and norms."""
        mlp_matrices = 3 if self.has_gated_mlp else 2
        return self.depth * (4 * self.hidden_size**2 + mlp_matrices * self.hidden_size * self.ffn_size)

    @property
    def table_patches(self) -> int:
        """Entries of the position table; 0 if positions are only rotary."""
        if self.axis_positions is not None:
            return 2 * self.axis_positions
        return 0 if self.image_size is None else (self.image_size // self.patch_size) ** 2

    @property
    def full_attention_blocks(self) -> int:
        """Number of blocks with attention over the full image or frame."""
        return self.depth if self.window_size is None else len(self.full_attention_layers)

    @property
    def block_period(self) -> int:
        """Period of block kinds: 1 if all are equal, `depth` if there is no period."""
        if self.window_size is None:
            return 1
        period = self.full_attention_layers[0] + 1 if self.full_attention_layers else 1
        regular = tuple(range(period - 1, self.depth, period)) if self.full_attention_layers else ()
        return period if regular == self.full_attention_layers and self.depth % period == 0 else self.depth

    @property
    def window_patches(self) -> int:
        """Patches of a full window, whose sides are multiples of `merge_size`; 0 without windows."""
        if self.window_size is None:
            return 0
        return (self.window_size // self.merge_size // self.patch_size * self.merge_size) ** 2

    @property
    def encoder_parameters(self) -> int:
        """Parameters of embedding, positions and blocks, excluding the projector."""
        h, is_qwen2_5, is_gemma4 = self.hidden_size, self.kind == "qwen2_5_vl", self.kind == "gemma4"
        # The first matrix maps a patch's three channels over all temporally merged frames.
        embedding = 3 * self.temporal_patch_size * self.patch_size**2 * h + self.table_patches * h
        embedding += 0 if is_qwen2_5 or is_gemma4 else h
        class_token = 2 * h if self.kind == "internvit" else 0  # token and position
        layer_scales = 2 * h if self.kind == "internvit" else 0
        # Two norms (without bias in Qwen2.5-VL); biases of qkv, output, and MLP matrices.
        norms, mlp = (2 * h, 2 * self.ffn_size + h) if is_qwen2_5 else (4 * h, self.ffn_size + h)
        vectors = norms + 4 * h + mlp + layer_scales
        if is_gemma4:  # four norms, plus query and key norms
            vectors = 4 * h + 2 * (h // self.num_heads)
        last_norm = 2 * h if self.kind == "siglip" else 0
        return embedding + class_token + self.block_parameters + self.depth * vectors + last_norm

    @property
    def projector_parameters(self) -> int:
        """Parameters of everything between the last block and the language model."""
        merged, out = self.hidden_size * self.merge_size**2, self.out_hidden_size
        if self.kind in ("siglip", "gemma4"):
            return (self.hidden_size if self.kind == "siglip" else 0) + self.hidden_size * out
        if self.kind == "internvit":
            return 2 * merged + (merged + 1) * out + (out + 1) * out
        mlp = (merged + 1) * merged + (merged + 1) * out
        norm = self.hidden_size if self.kind == "qwen2_5_vl" else 2 * self.hidden_size
        return norm + mlp + len(self.deepstack_layers) * (2 * merged + mlp)

    @property
    def parameters(self) -> int:
        return self.encoder_parameters + self.projector_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(LanguageModel):
    """A decoder-only language model, optionally with a vision tower.

    Attributes:
        architecture: family in transformers.
        sources: origin of each value or block.
    """

    name: str
    vision: VisionSpec | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def parameters(self) -> int:
        return self.text_parameters + (self.vision.parameters if self.vision else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Description:
    """Content of a description file without `format`."""

    name: NonEmptyText
    architecture: Architecture
    text: TextFigures
    vision: VisionSpec | None = None
    aliases: tuple[NonEmptyText, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Load a shipped model by name or alias, or a description by path: YAML, config.json, or its folder.

    Raises:
        ProfileError: the name is unknown (the message lists similar ones), or the file is unreadable or inconsistent.
    """
    path = Path(name_or_path)
    if path.is_dir() and (path / "config.json").is_file():
        return load_hf_config(path / "config.json")
    if path.suffix == ".json":
        return load_hf_config(path)
    if path.suffix not in {".yaml", ".yml"}:
        path = find_shipped(str(name_or_path), kind="model")
    found = validated(read_description(path, kind="model"), _Description, where=str(path), error=ProfileError)
    return _checked(
        ModelSpec(
            **fields_of(TextFigures, found.text),
            name=found.name,
            architecture=found.architecture,
            vision=found.vision,
            aliases=found.aliases,
            sources=found.sources,
        ),
        where=str(path),
    )


def known_model(name: str) -> ModelSpec | None:
    """Load a model like `load_model`, or return None if it cannot be read."""
    try:
        return load_model(name)
    except ProfileError:
        return None


def load_hf_config(path: Path) -> ModelSpec:
    """Read a config.json: the language model, and the vision encoder if any.

    Raises:
        ProfileError: the file is unreadable or inconsistent, or the architecture or its encoder is not supported.
    """
    read = read_hf_config(path)
    text = validated(read.figures, TextFigures, where=str(path), error=ProfileError)
    vision = None
    if read.vision is not None:
        vision = validated(read.vision, VisionSpec, where=f"{path}: vision_config", error=ProfileError)
    spec = ModelSpec(
        **fields_of(TextFigures, text),
        name=read.name,
        architecture=read.architecture,
        vision=vision,
        sources={"text": str(path)},
    )
    return _checked(spec, where=str(path))


def _checked(spec: ModelSpec, *, where: str) -> ModelSpec:
    """Return the model, or raise ProfileError on the first inconsistency."""
    blocks: list[tuple[str, TextFigures | KeyValueHeads]] = [("", spec)]
    if spec.full_heads is not None:
        blocks.append(("full_heads.", spec.full_heads))
    complaints = [
        (
            spec.num_heads % heads.num_kv_heads != 0,
            f"{block}num_kv_heads {heads.num_kv_heads} does not divide num_heads {spec.num_heads}",
        )
        for block, heads in blocks
    ]
    complaints += [
        (spec.head_dim % 2 != 0, f"head_dim {spec.head_dim} is odd; rotary positions need an even one"),
        (spec.hidden_size % 2 != 0, f"hidden_size {spec.hidden_size} is odd"),
        (
            spec.architecture == "llama" and spec.hidden_size % spec.num_heads != 0,
            f"hidden_size {spec.hidden_size} is not divisible by num_heads {spec.num_heads}",
        ),
    ]
    complaints += _kind_complaints(spec)
    if spec.vision is not None:
        complaints += _vision_complaints(spec, spec.vision)
    for wrong, message in complaints:
        if wrong:
            raise ProfileError(f"{where}: {message}")
    return spec


def _kind_complaints(spec: ModelSpec) -> list[tuple[bool, str]]:
    """Return (is wrong, message) checks of layer kinds and their blocks."""
    experts, latent, linear, mamba = spec.experts, spec.latent, spec.linear, spec.mamba
    needed = {"window": spec.window_tokens, "latent": latent, "linear": linear, "mamba": mamba}
    key = {"window": "window_tokens"}
    complaints = [(not spec.attention, "attention is empty; it names the kinds of the first layers, as [full]")]
    complaints += [
        (
            kind in spec.attention and figures is None,
            f"attention has {kind} layers, and {key.get(kind, kind)} is missing",
        )
        for kind, figures in needed.items()
    ]
    kinds = spec.layer_kinds if spec.attention else ()
    is_empty = [kind.attention == kind.mlp == "none" for kind in kinds]
    complaints += [
        (
            any(kind.mlp == "dense" for kind in kinds) and spec.ffn_size is None,
            "ffn_size is missing, and layers have no experts",
        ),
        (any(is_empty), f"layer {is_empty.index(True) if any(is_empty) else 0} has neither attention nor an MLP"),
        (any(kind.has_experts for kind in kinds) and experts is None, "mlp has experts, and the block is missing"),
    ]
    if spec.reused is not None:
        first = spec.num_layers - spec.reused.layers
        before, after = ({kind.attention for kind in part} for part in (kinds[: max(first, 0)], kinds[first:]))
        complaints.append(
            (
                first < 1 or not after <= before,
                f"reused.layers {spec.reused.layers} of {spec.num_layers} leaves no earlier layer of their kinds whose "
                "keys and values they could reuse",
            )
        )
    if experts is not None:
        complaints.append(
            (experts.active > experts.count, f"experts.active {experts.active} exceeds experts.count {experts.count}")
        )
    if latent is not None:
        rotary = latent.rotary_size
        complaints += [
            (rotary >= spec.head_dim, f"latent.rotary_size {rotary} leaves nothing of head_dim {spec.head_dim}"),
            (
                spec.num_kv_heads != spec.num_heads,
                f"num_kv_heads {spec.num_kv_heads} differs from num_heads {spec.num_heads}, and attention is latent",
            ),
        ]
    if linear is not None:
        keys, values = linear.key_heads, linear.value_heads
        complaints.append((values % keys != 0, f"linear.key_heads {keys} does not divide linear.value_heads {values}"))
    if mamba is not None:
        complaints += [
            (mamba.heads % mamba.groups != 0, f"mamba.groups {mamba.groups} does not divide mamba.heads {mamba.heads}"),
            (
                spec.architecture == "bamba" and mamba.width % spec.hidden_size != 0,
                f"mamba.heads {mamba.heads} of mamba.head_size {mamba.head_size} are no multiple of hidden_size "
                f"{spec.hidden_size}",
            ),
        ]
    return complaints


def _vision_complaints(spec: ModelSpec, vision: VisionSpec) -> list[tuple[bool, str]]:
    return [
        (
            vision.hidden_size % vision.num_heads != 0,
            f"vision.hidden_size {vision.hidden_size} is not divisible by vision.num_heads {vision.num_heads}",
        ),
        (
            vision.out_hidden_size != spec.hidden_size,
            f"vision.out_hidden_size {vision.out_hidden_size} differs from text.hidden_size {spec.hidden_size}",
        ),
        (
            (vision.image_size or 0) % vision.patch_size != 0,
            f"vision.image_size {vision.image_size} is not a multiple of vision.patch_size {vision.patch_size}",
        ),
        (
            any(layer >= vision.depth for layer in vision.deepstack_layers),
            f"vision.deepstack_layers {list(vision.deepstack_layers)} has blocks beyond vision.depth {vision.depth}",
        ),
        (
            any(layer >= vision.depth for layer in vision.full_attention_layers),
            f"vision.full_attention_layers {list(vision.full_attention_layers)} has blocks beyond vision.depth "
            f"{vision.depth}",
        ),
        (
            vision.window_size is not None and vision.window_patches == 0,
            f"vision.window_size {vision.window_size} is smaller than merge_size x patch_size",
        ),
        (
            (vision.image_size is None) != (vision.kind in ("qwen2_5_vl", "gemma4")),
            f"vision.image_size is {vision.image_size}; kinds but qwen2_5_vl and gemma4 have a table of positions in a "
            "square, and need it",
        ),
        (
            (vision.axis_positions is None) == (vision.kind == "gemma4"),
            f"vision.axis_positions is {vision.axis_positions}; gemma4 needs it, and no other kind has it",
        ),
    ]


_YAML: Final = (".yaml", ".yml")
Kind = Literal["model", "cluster"]


def read_description(path: Path, *, kind: Kind) -> dict[str, Any]:
    """Read a description file; return its mapping without `format`."""
    text = read_text(path, error=ProfileError, label=f"the {kind} ")
    document = parse_yaml(text, name=str(path), error=ProfileError)
    found = document.pop("format", None) if isinstance(document, dict) else type(document).__name__
    if not isinstance(document, dict) or found != f"fcp-{kind}/1":
        raise ProfileError(f"{path} is not a {kind} description: expected 'format: fcp-{kind}/1', found {found!r}")
    return document


def find_shipped(name: str, *, kind: Kind) -> Path:
    """Return the shipped description with that name or alias; case, dashes and an organisation prefix are ignored."""
    if _is_path(name):
        what = "a YAML, a config.json or the folder of a checkpoint" if kind == "model" else "a YAML"
        near = _nearest_files(name, kind)
        hint = f"nearest: {', '.join(near)}" if near else f"names of shipped {kind}s: 'fcp list {kind}s'"
        raise ProfileError(f"{name} is not {what}, or does not exist; {hint}")
    names, path = _shipped_names(kind), _shipped_path(name, kind)
    if path is not None:
        return path
    keys = {_key(candidate): candidate for candidate in names}
    near = _nearest_files(name, kind)
    near += [keys[key] for key in nearest_words(_key(name), keys, most=3, cutoff=0.5)]
    hint = f"nearest: {', '.join(near[:3])}" if near else f"known: {', '.join(shipped_names(kind))}"
    other = "or give a YAML or the folder of a checkpoint" if kind == "model" else "or give a YAML"
    raise ProfileError(f"unknown {kind} {name!r}; {hint}; {other}")


def _nearest_files(name: str, kind: Kind) -> list[str]:
    """Return the descriptions with the most similar names in the folder that a name points to, written as it is."""
    start = name[: name.rfind("/") + 1]
    try:
        found = list(Path(start).expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    files = (one for one in found if one.suffix in _YAML or (kind == "model" and (one / "config.json").is_file()))
    return nearest_words(name, [f"{start}{one.name}" for one in files], most=3)


def is_shipped(name: str, *, kind: Kind) -> bool:
    """Return whether a description with that name or alias is shipped."""
    return _shipped_path(name, kind) is not None


def _is_path(name: str) -> bool:
    """Return whether a name is clearly a path, so that a mistyped path never matches a shipped name."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _shipped_path(name: str, kind: Kind) -> Path | None:
    if _is_path(name):
        return None
    by_key = {_key(candidate): path for candidate, path in _shipped_names(kind).items()}
    return by_key.get(_key(name)) or by_key.get(_key(name.rsplit("/", 1)[-1]))


def shipped_aliases(kind: Kind) -> dict[str, list[str]]:
    """Return the aliases of each shipped description."""
    aliases: dict[str, list[str]] = {name: [] for name in shipped_names(kind)}
    for name, path in _shipped_names(kind).items():
        if name != path.stem:
            aliases[path.stem].append(name)
    return aliases


def shipped_names(kind: Kind) -> list[str]:
    """Return the names of all shipped descriptions, without aliases."""
    return sorted(path.stem for path in (shipped("profiles") / f"{kind}s").glob("*.yaml"))


@cache
def _shipped_names(kind: Kind) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for path in sorted((shipped("profiles") / f"{kind}s").glob("*.yaml")):
        document = read_description(path, kind=kind)
        names[document["name"]] = path
        names.update(dict.fromkeys(document.get("aliases", []), path))
    return names


def _key(name: str) -> str:
    # Keep dots, since 1.7 and 17 billion parameters differ, and slashes, for organisation names.
    return re.sub(r"[^a-z0-9./]", "", name.lower())


# Counts the operations (FLOPs) of a model's forward pass, as a sum over layer kinds.
#
# - Matrices: 2 per entry and token; of experts, only active ones. - Causal softmax attention: H (D + Dv) per layer
# and token pair, half of a full mask's (D = head size of queries and keys, Dv of values). For windows,
# `cost.model.windowed_pairs` counts the pairs. - Linear attention, in chunks of C tokens with a Dk x Dv state per
# head: 2 C (3 Dk + 2 Dv) + 6 Dk Dv per token and head. - State spaces with a P x N state per head: 2 C (N + P) + 4 P
# N per token and head, as in transformers, which repeats a group's states for each head. - Vision encoder: full
# attention, 4 h per block and pair of patches in an image, frame or window. Pairs in windows grow linearly with the
# patches.


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
