"""How many of a model's parameters are trained, by its figures and by the names that transformers gives its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe
from fcp_cli.tuning import ALL_LINEAR, Lora, matches, parse_lora, patterns_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Parameters that a recipe of adapters or frozen patterns trains.

    Attributes:
        total: of the whole model.
        layer: of the layer of the language model that has most.
        table: of the largest embedding or output table.
        root: of all that is no layer of the language model.
        adapters: of the total, those that stand beside the model's own.
    """

    total: int
    layer: int
    table: int
    root: int
    adapters: int = 0


def trained_parameters(spec: ModelSpec, recipe: Recipe) -> Trained | None:
    """Count what is trained; None: the whole model, or all of it but the vision encoder."""
    if recipe.lora is not None:
        return _adapters(spec, parse_lora(recipe.lora), with_vision=not recipe.freeze_vision)
    if recipe.freeze is None:
        return None
    patterns = patterns_of(recipe.freeze)
    sizes = {
        name: size
        for name, size in _weights(spec)
        if not any(matches(name, pattern) for pattern in patterns)
        and not (recipe.freeze_vision and _is_vision(name, spec))
    }
    layers = [
        sum(size for name, size in sizes.items() if name.startswith(f"{_layers(spec)}{layer}."))
        for layer in range(spec.num_layers)
    ]
    tables = [size for name, size in sizes.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    total = sum(sizes.values())
    return Trained(total=total, layer=max(layers), table=max(tables, default=0), root=total - sum(layers))


def _adapters(spec: ModelSpec, lora: Lora, *, with_vision: bool) -> Trained:
    layer = _adapter_parameters(_projections(spec), lora)
    root = 0
    if spec.vision is not None and with_vision:
        root += spec.vision.depth * _adapter_parameters(_vision_projections(spec.vision), lora)
        root += (1 + len(spec.vision.deepstack_layers)) * _adapter_parameters(_mergers(spec.vision), lora)
    total = spec.num_layers * layer + root
    return Trained(total=total, layer=layer, table=0, root=root, adapters=total)


def _adapter_parameters(matrices: Mapping[str, tuple[int, int]], lora: Lora) -> int:
    wanted = [
        ends for name, ends in matrices.items() if lora.targets == (ALL_LINEAR,) or name.split(".")[1] in lora.targets
    ]
    return lora.rank * sum(map(sum, wanted))


def _projections(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the ends of each matrix of a layer of the language model."""
    h, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {"q_proj": (h, queries), "k_proj": (h, keys), "v_proj": (h, keys), "o_proj": (queries, h)}
    mlp = {"gate_proj": (h, spec.ffn_size), "up_proj": (h, spec.ffn_size), "down_proj": (spec.ffn_size, h)}
    return {f"self_attn.{name}": ends for name, ends in attention.items()} | {
        f"mlp.{name}": ends for name, ends in mlp.items()
    }


def _vision_projections(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Return the ends of each matrix of a block of the encoder; there are three in a gated MLP, and two in others."""
    h, f, kind = vision.hidden_size, vision.ffn_size, vision.kind
    if kind == "internvit":
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "projection_layer"), (h, h))
        mlp = {"fc1": (h, f), "fc2": (f, h)}
    else:
        attention = {"qkv": (h, 3 * h), "proj": (h, h)}
        gated = {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
        mlp = {"linear_fc1": (h, f), "linear_fc2": (f, h)} if kind == "qwen3_vl" else gated
    return {f"attn.{name}": ends for name, ends in attention.items()} | {
        f"mlp.{name}": ends for name, ends in mlp.items()
    }


def _mergers(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Return the ends of each matrix of the projector, of which there is one more for every deepstack layer."""
    merged, out = vision.hidden_size * vision.merge_size**2, vision.out_hidden_size
    if vision.kind == "internvit":
        return {"projector.linear_1": (merged, out), "projector.linear_2": (out, out)}
    first, second = ("linear_fc1", "linear_fc2") if vision.kind == "qwen3_vl" else ("0", "2")
    return {f"merger.{first}": (merged, merged), f"merger.{second}": (merged, out)}


def _weights(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield name and size of the weights; of a vision encoder as one, and of its projector as one."""
    root = _layers(spec).removesuffix("layers.")
    yield f"{root}embed_tokens.weight", spec.embedding_parameters
    for layer in range(spec.num_layers):
        matrices = {name: rows * columns for name, (rows, columns) in _projections(spec).items()}
        for name, size in matrices.items():
            yield f"{root}layers.{layer}.{name}.weight", size
        yield f"{root}layers.{layer}.input_layernorm.weight", spec.layer_parameters - sum(matrices.values())
    yield f"{root}norm.weight", spec.hidden_size
    if not spec.tied_embeddings:
        yield "lm_head.weight", spec.embedding_parameters
    if spec.vision is not None:
        is_intern = spec.vision.kind == "internvit"
        tower = "model.vision_tower.encoder.weight" if is_intern else "model.visual.blocks.weight"
        projector = "model.multi_modal_projector.weight" if is_intern else "model.visual.merger.weight"
        yield tower, spec.vision.encoder_parameters
        yield projector, spec.vision.projector_parameters


def _layers(spec: ModelSpec) -> str:
    return "model.language_model.layers." if spec.vision is not None else "model.layers."


def _is_vision(name: str, spec: ModelSpec) -> bool:
    return spec.vision is not None and not name.startswith(("model.language_model.", "lm_head."))
