"""Trained part of a model under adapters or frozen weights: number of parameters, and work of the backward.

Frozen patterns match the names of the weights in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fcp_cli.errors import UsageError
from fcp_cli.models.layers import Matrix
from fcp_cli.models.model import ModelSpec, VisionSpec
from fcp_cli.recipe import Recipe
from fcp_cli.tuning import ALL_LINEAR, Lora, matches, parse_lora, patterns_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Numbers of trained parameters under adapters or frozen patterns.

    Attributes:
        total: trained parameters of the whole model.
        layer: those of the language model's layer with the most.
        table: those of the largest embedding or output table.
        root: those outside the language model's layers.
        adapters: the part of the total in adapters, which are not among the model's own parameters.
    """

    total: int
    layer: int
    table: int
    root: int
    adapters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Backward work over the matrices of a model or encoder; each as a share of one forward.

    Attributes:
        inputs: gradients of matrix inputs, needed above the first trained weight.
        weights: gradients of trained matrices.
        adapters: forward of adapters.
    """

    inputs: float = 1.0
    weights: float = 1.0
    adapters: float = 0.0

    def total(self, *, recomputes: bool = False) -> float:
        """Return forward plus backward work: 3 if all is trained; layers without a backward are not recomputed."""
        again = float(recomputes)
        return 1.0 + self.inputs + self.weights + again * self.inputs + (3.0 + again) * self.adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Work of a backward if parts of the model are frozen; the default is full training.

    Attributes:
        layers: share of the language model's layers that the backward reaches.
        language: passes over the language model's matrices and the output layer.
        vision: passes over the vision encoder and the projector; `inputs` is 0 if no encoder block is trained.
    """

    layers: float = 1.0
    language: Passes = Passes()
    vision: Passes = Passes()


def backward_of(spec: ModelSpec, recipe: Recipe) -> Backward:
    """Return the backward work under a recipe; a partly trained layer counts as fully trained."""
    vision = Passes(inputs=0.0, weights=0.0) if recipe.freeze_vision or spec.vision is None else Passes()
    if recipe.lora is not None:
        return _backward_of_adapters(spec, parse_lora(recipe.lora), vision)
    if recipe.freeze is None:
        return Backward(vision=vision)
    return _backward_of_rest(spec, _left_to_train(spec, recipe, recipe.freeze))


def check_trained(spec: ModelSpec, recipe: Recipe) -> None:
    """Raise UsageError if a recipe trains no parameter of a model."""
    if recipe.freeze_vision and spec.vision is None:
        raise UsageError(f"--freeze-vision: {spec.name} has no vision encoder")
    trained = trained_parameters(spec, recipe)
    if trained is None or trained.total > 0:
        return
    if recipe.lora is not None:
        targets = "+".join(parse_lora(recipe.lora).targets)
        raise UsageError(
            f"--lora: {targets} names no linear layer of {spec.name}; q_proj+v_proj are some, or {ALL_LINEAR}"
        )
    raise UsageError(f"--freeze {recipe.freeze} leaves nothing of {spec.name} to train; remove some of its patterns")


def trained_parameters(spec: ModelSpec, recipe: Recipe) -> Trained | None:
    """Return the trained parameters; None without adapters and frozen patterns, even if the encoder is frozen."""
    if recipe.lora is not None:
        return _adapters(spec, parse_lora(recipe.lora), with_vision=not recipe.freeze_vision)
    if recipe.freeze is None:
        return None
    sizes = _left_to_train(spec, recipe, recipe.freeze)
    layers = [_size_of_layer(spec, sizes, layer) for layer in range(spec.num_layers)]
    tables = [size for name, size in sizes.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    total = sum(sizes.values())
    return Trained(total=total, layer=max(layers), table=max(tables, default=0), root=total - sum(layers))


def _left_to_train(spec: ModelSpec, recipe: Recipe, freeze: str) -> dict[str, int]:
    """Return the sizes of the weights that are not frozen, by name."""
    patterns = patterns_of(freeze)
    return {
        name: size
        for name, size in _weights(spec)
        if not any(matches(name, pattern) for pattern in patterns)
        and not (recipe.freeze_vision and _is_vision(name, spec))
    }


def _size_of_layer(spec: ModelSpec, sizes: Mapping[str, int], layer: int) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(f"{_layers(spec)}{layer}."))


def _backward_of_adapters(spec: ModelSpec, lora: Lora, vision: Passes) -> Backward:
    tuned = _adapters(spec, lora, with_vision=vision.inputs > 0)
    of_language = tuned.total - tuned.root
    language = Passes(weights=0.0, adapters=of_language / spec.matrix_parameters)
    if spec.vision is None or not tuned.root:
        return Backward(language=language, vision=Passes(inputs=0.0, weights=0.0))
    of_vision = spec.vision.block_parameters + spec.vision.projector_parameters
    return Backward(language=language, vision=Passes(weights=0.0, adapters=tuned.root / of_vision))


def _backward_of_rest(spec: ModelSpec, sizes: Mapping[str, int]) -> Backward:
    """Return the backward work if only the weights in `sizes` are trained."""
    table = f"{_layers(spec).removesuffix('layers.')}embed_tokens.weight"
    head = table if spec.tied_embeddings else "lm_head.weight"
    is_reached_whole = table in sizes or any(_is_vision(name, spec) for name in sizes)
    trained = [layer for layer in range(spec.num_layers) if _size_of_layer(spec, sizes, layer)]
    # The backward ends at the first trained layer; a trained table or encoder precedes all layers.
    reached = spec.num_layers - (0 if is_reached_whole else min(trained, default=spec.num_layers))
    is_head_alone = not reached and set(sizes) == {head}
    kinds = spec.layer_kinds
    inputs = sum(
        spec.active_layer_parameters(kinds[layer]) for layer in range(spec.num_layers - reached, spec.num_layers)
    )
    inputs += 0 if is_head_alone else spec.embedding_parameters
    weights = _active_weights(spec, sizes) + sizes.get(head, 0)
    language = Passes(inputs=inputs / spec.matrix_parameters, weights=weights / spec.matrix_parameters)
    return Backward(
        layers=reached / spec.num_layers,
        language=language,
        vision=Passes(inputs=0.0, weights=0.0) if spec.vision is None else _passes_of_encoder(spec.vision, sizes),
    )


def _passes_of_encoder(vision: VisionSpec, sizes: Mapping[str, int]) -> Passes:
    """Return the passes over an encoder and its projector, which sees merge_size^2 times fewer inputs."""
    blocks, projector = vision.block_parameters, vision.projector_parameters / vision.merge_size**2
    trains_encoder = _encoder(vision) in sizes
    trained = (blocks if trains_encoder else 0) + (projector if _projector(vision) in sizes else 0)
    return Passes(inputs=float(trains_encoder), weights=trained / (blocks + projector))


def _active_weights(spec: ModelSpec, sizes: Mapping[str, int]) -> int:
    """Return the active parameters per token of the layer matrices in `sizes`."""
    return sum(
        matrix.active_parameters
        for layer, kind in enumerate(spec.layer_kinds)
        for name, matrix in spec.matrices(kind).items()
        if _weight(spec, layer, name, matrix) in sizes
    )


def _adapters(spec: ModelSpec, lora: Lora, *, with_vision: bool) -> Trained:
    layers = {
        kind: _adapter_parameters(
            {name: matrix.ends for name, matrix in spec.matrices(kind).items() if matrix.is_linear}, lora
        )
        for kind in spec.kinds
    }
    root = 0
    if spec.vision is not None and with_vision:
        root += spec.vision.depth * _adapter_parameters(_vision_projections(spec.vision), lora)
        root += (1 + len(spec.vision.deepstack_layers)) * _adapter_parameters(_mergers(spec.vision), lora)
    total = sum(count * layers[kind] for kind, count in spec.kinds.items()) + root
    return Trained(total=total, layer=max(layers.values()), table=0, root=root, adapters=total)


def _adapter_parameters(matrices: Mapping[str, tuple[int, int]], lora: Lora) -> int:
    wanted = [
        ends for name, ends in matrices.items() if lora.targets == (ALL_LINEAR,) or name.split(".")[-1] in lora.targets
    ]
    return lora.rank * sum(map(sum, wanted))


def _vision_projections(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Return (input size, output size) of each linear layer in an encoder block."""
    h, f, kind = vision.hidden_size, vision.ffn_size, vision.kind
    if kind == "gemma4":
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (h, h))
        mlp = {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
    elif kind in ("internvit", "siglip"):
        last = "projection_layer" if kind == "internvit" else "out_proj"
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", last), (h, h))
        mlp = {"fc1": (h, f), "fc2": (f, h)}
    else:
        attention = {"qkv": (h, 3 * h), "proj": (h, h)}
        gated = {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
        mlp = {"linear_fc1": (h, f), "linear_fc2": (f, h)} if kind == "qwen3_vl" else gated
    return {f"attn.{name}": ends for name, ends in attention.items()} | {
        f"mlp.{name}": ends for name, ends in mlp.items()
    }


def _mergers(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Return (input size, output size) of each linear layer in the projector; every deepstack layer has another one."""
    merged, out = vision.hidden_size * vision.merge_size**2, vision.out_hidden_size
    if vision.kind == "siglip":
        return {}  # its matrix is a bare parameter, not nn.Linear
    if vision.kind == "gemma4":
        return {"embed_vision.embedding_projection": (vision.hidden_size, out)}
    if vision.kind == "internvit":
        return {"projector.linear_1": (merged, out), "projector.linear_2": (out, out)}
    first, second = ("linear_fc1", "linear_fc2") if vision.kind == "qwen3_vl" else ("0", "2")
    return {f"merger.{first}": (merged, merged), f"merger.{second}": (merged, out)}


def _weights(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of the weights; a vision encoder counts as one weight, and so does its projector."""
    root = _layers(spec).removesuffix("layers.")
    yield f"{root}embed_tokens.weight", spec.embedding_parameters
    for layer, kind in enumerate(spec.layer_kinds):
        matrices = spec.matrices(kind)
        for name, matrix in matrices.items():
            yield _weight(spec, layer, name, matrix), matrix.parameters
        # The model description only has the sum of a layer's norms and biases, listed here under one of their names.
        vectors = spec.layer_parameters(kind) - sum(matrix.parameters for matrix in matrices.values())
        yield f"{root}layers.{layer}.input_layernorm.weight", vectors
    yield f"{root}norm.weight", spec.root_vectors
    if spec.layer_inputs is not None:
        embeddings, projection = spec.layer_input_parameters
        yield f"{root}embed_tokens_per_layer.weight", embeddings
        yield f"{root}per_layer_model_projection.weight", projection
    if not spec.tied_embeddings:
        yield "lm_head.weight", spec.embedding_parameters
    if spec.vision is not None:
        yield _encoder(spec.vision), spec.vision.encoder_parameters
        yield _projector(spec.vision), spec.vision.projector_parameters


def _weight(spec: ModelSpec, layer: int, name: str, matrix: Matrix) -> str:
    # transformers stores experts as stacked parameters, without a module (and ".weight") each.
    return f"{_layers(spec)}{layer}.{name}" + ("" if matrix.copies > 1 else ".weight")


def _encoder(vision: VisionSpec) -> str:
    return "model.vision_tower.encoder.weight" if _has_tower(vision) else "model.visual.blocks.weight"


def _projector(vision: VisionSpec) -> str:
    return "model.multi_modal_projector.weight" if _has_tower(vision) else "model.visual.merger.weight"


def _has_tower(vision: VisionSpec) -> bool:
    return vision.kind in ("internvit", "siglip", "gemma4")


def _layers(spec: ModelSpec) -> str:
    return "model.language_model.layers." if spec.vision is not None else "model.layers."


def _is_vision(name: str, spec: ModelSpec) -> bool:
    return spec.vision is not None and not name.startswith(("model.language_model.", "lm_head."))
