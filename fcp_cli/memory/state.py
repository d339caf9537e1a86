"""Token-independent memory of a rank: weights, gradients, optimizer state, and reduction buffers.

From ZeRO stage 2 on, weights are sharded by FSDP2, whose units are the layers and a root with all other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from fcp_cli.cost.recipe import (
    ALL_LINEAR,
    GRADIENT_BUCKET_BYTES,
    GRADIENT_BUCKETS,
    Lora,
    Recipe,
    matches,
    parse_lora,
    patterns_of,
)
from fcp_cli.errors import UsageError
from fcp_cli.memory.items import MemoryItem, Precision
from fcp_cli.models.layers import Matrix
from fcp_cli.models.model import ModelSpec, VisionSpec

# NCCL's buffers per peer: 1.06 -> 4.34 GB after 7 peers (NVIDIA/nccl issue 1685). In one node, with 32 channels of a
# message; on several nodes a peer has 8 or fewer (launching/environment.py), so this is the most.
PEER_BYTES = 0.47e9
COMMUNICATOR_BYTES = 0.5e9  # a communicator of all ranks, before its first peer connection
_COMMUNICATORS = 2  # one for collectives, one for rings


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Model-parallel sharding, in addition to ZeRO.

    Attributes:
        tensor_parallel, pipeline_parallel: parallel sizes within a rank.
        expert_parallel: ranks that the experts of a layer are distributed over, whole experts each.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def devices(self) -> int:
        """Devices of a rank."""
        return self.tensor_parallel * self.pipeline_parallel


WHOLE: Final = Cut()


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Model state on the fullest device of a rank.

    Attributes:
        shards: ranks that one copy of the sharded tensors is distributed over.
    """

    spec: ModelSpec
    recipe: Recipe
    precision: Precision
    shards: int
    cut: Cut = WHOLE

    @property
    def is_sharded(self) -> bool:
        return self.recipe.zero_stage >= 2

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether every rank accumulates unsharded gradients between micro-batches."""
        return self.recipe.zero_stage < 3 or self.recipe.reduce == "step"

    @property
    def parameters(self) -> float:
        return self._parameters(self.spec) + (self._share(tuned.adapters) if (tuned := self._tuned) else 0.0)

    @property
    def trained(self) -> float:
        if tuned := self._tuned:
            return self._share(tuned.total)
        return self._parameters(replace(self.spec, vision=None) if self.recipe.freeze_vision else self.spec)

    @property
    def _tuned(self) -> Trained | None:
        return trained_parameters(self.spec, self.recipe)

    def _share(self, parameters: float) -> float:
        return parameters / self.cut.devices

    @property
    def trained_table(self) -> float:
        return min(self.table, tuned.table) if (tuned := self._tuned) else self.table

    @property
    def trained_layer(self) -> float:
        return min(self.layer, tuned.layer) if (tuned := self._tuned) else self.layer

    @property
    def trained_root(self) -> float:
        return min(self.root, tuned.root) if (tuned := self._tuned) else self.root

    def _parameters(self, spec: ModelSpec) -> float:
        layers = (
            self._stage_layers * (spec.layers_parameters - self._elsewhere(spec.expert_parameters)) / spec.num_layers
        )
        vision = spec.vision.parameters if spec.vision else 0  # on the first pipeline stage
        rest = spec.root_vectors + sum(spec.layer_input_parameters) + vision
        return (layers + rest) / self.cut.tensor_parallel + self.tables

    @property
    def _stage_layers(self) -> int:
        return math.ceil(self.spec.num_layers / self.cut.pipeline_parallel)

    def _elsewhere(self, experts: int) -> float:
        """Return the number of expert parameters that are on other expert-parallel ranks."""
        return experts * (1 - 1 / self.cut.expert_parallel)

    @property
    def _all_experts(self) -> State:
        """State without expert parallelism, for shards: ZeRO divides experts by the ranks that hold the same ones, so
        both divisions together give a 1 / shards share of all experts.
        """
        return replace(self, cut=replace(self.cut, expert_parallel=1))

    @property
    def table(self) -> float:
        """Parameters of an embedding or output table."""
        return self.spec.embedding_parameters / self.cut.tensor_parallel

    @property
    def tables(self) -> float:
        """Parameters of a pipeline stage's embedding and output tables."""
        return self.table * (1 if self.spec.tied_embeddings or self.cut.pipeline_parallel > 1 else 2)

    @property
    def layer(self) -> float:
        """Parameters of the largest layer."""
        layers = [
            self.spec.layer_parameters(kind) - self._elsewhere(self.spec.layer_expert_parameters(kind))
            for kind in self.spec.kinds
        ]
        return max(layers) / self.cut.tensor_parallel

    @property
    def root(self) -> float:
        """Parameters outside layers: tables, vectors, and a vision model's patch embedding and projector."""
        vision = self.spec.vision
        rest = vision.parameters - vision.block_parameters if vision else 0
        rest += self.spec.root_vectors + sum(self.spec.layer_input_parameters)
        return self.tables + rest / self.cut.tensor_parallel

    @property
    def computed_weight(self) -> int:
        """Bytes of a weight in the type that the model computes with."""
        return self.precision.gathered if self.is_sharded else self.precision.weight

    def held(self) -> tuple[MemoryItem, ...]:
        """Return the persistent memory of a rank from the first micro-batch of a step on."""
        precision, stage = self.precision, self.recipe.zero_stage
        if not self.is_sharded:
            shared_out = self._all_experts.trained / self.shards
            updated = (precision.master + precision.moments) * (shared_out if stage == 1 else self.trained)
            return (
                MemoryItem(name="weights", fixed_bytes=precision.weight * self.parameters),
                MemoryItem(name="gradients", fixed_bytes=precision.gradient * self.trained),
                MemoryItem(name="optimizer", fixed_bytes=updated),
            )
        # Trained shards are kept in the optimizer's precision, frozen weights in that of the matrix products.
        whole = self._all_experts
        shards = max(precision.weight, precision.master) * whole.trained
        shards += precision.gathered * (whole.parameters - whole.trained)
        gradients = self.trained if self.keeps_whole_gradients else whole.trained / self.shards
        return (
            MemoryItem(name="weights", fixed_bytes=shards / self.shards),
            MemoryItem(name="gathered weights", fixed_bytes=precision.gathered * self._gathered),
            MemoryItem(name="gradients", fixed_bytes=precision.gradient * gradients),
            MemoryItem(name="optimizer", fixed_bytes=precision.moments * whole.trained / self.shards),
        )

    @property
    def _gathered(self) -> float:
        # The root stays gathered from forward to backward; a layer computes while the next one is prefetched.
        return self.parameters if self.recipe.zero_stage == 2 else self.root + 2 * self.layer

    def head_gradient(self) -> MemoryItem:
        """Return the new gradient of the output table during the loss's backward."""
        return MemoryItem(name="new gradients", fixed_bytes=self.computed_weight * self.trained_table)

    def new_gradients(self) -> MemoryItem:
        """Return the new gradients that are not yet accumulated during the backward of a layer.

        Without sharding each is accumulated at once, except a tied table's, which waits for the embedding's. FSDP2
        accumulates at the end of a layer's backward, and the root at the end of the whole backward. If the types are
        equal, autograd accumulates at once.
        """
        size = self.computed_weight
        adds_at_once = not self.is_sharded or (self.keeps_whole_gradients and size == self.precision.gradient)
        if adds_at_once:
            return MemoryItem(
                name="new gradients", fixed_bytes=size * self.trained_table if self.spec.tied_embeddings else 0.0
            )
        matrix = min(self.spec.largest_mlp_matrix_parameters / self.cut.tensor_parallel, self.trained_layer)
        # Reduced in fp32 at the end of each layer's backward; the buffer is freed when the next reduction begins.
        message = 0.0 if self.keeps_whole_gradients else self.precision.gradient * self.trained_layer
        return MemoryItem(name="new gradients", fixed_bytes=size * (self.trained_table + matrix) + message)

    def reduction(self) -> tuple[MemoryItem, ...]:
        """Return the persistent memory of a rank plus the buffers while its largest gradients are reduced."""
        precision = self.precision
        if not self.is_sharded:
            # Large gradients are reduced in place; new are buckets of others or, of ZeRO-1, the reduced shard.
            message = min(GRADIENT_BUCKETS * GRADIENT_BUCKET_BYTES, precision.gradient * self.trained)
            if self.recipe.zero_stage == 1:
                message = precision.gradient * self.trained_table / self.shards if self.shards > 1 else 0.0
            return (*self.held(), MemoryItem(name="gradient message", fixed_bytes=message))
        # The root's gradients are the largest: copied to a buffer once FSDP2 has freed the root's gathered weights.
        message = precision.gradient * self.trained_root
        if self.recipe.zero_stage == 2:
            more = message - precision.gathered * self.root
            more = more if self._tuned is None else max(more, 0.0)
            return (*self.held(), MemoryItem(name="gradient message", fixed_bytes=more))
        if self.keeps_whole_gradients:
            return self.held()  # each layer's buffer replaces its gradients during the last backward
        held = tuple(item for item in self.held() if item.name != "gathered weights")
        new = MemoryItem(name="new gradients", fixed_bytes=self.computed_weight * self.trained_root)
        return (*held, new, MemoryItem(name="gradient message", fixed_bytes=message))

    def copies(self, *, of_all: bool) -> MemoryItem:
        """Return autocast's weight copies of linear layers, of all layers or of a single recomputed one.

        Autocast keeps them until the end of the forward, and autograd until the backward that uses them.
        """
        spec = self.spec
        products = {kind: spec.layer_linear_parameters(kind) for kind in spec.kinds}
        of_layers = sum(count * products[kind] for kind, count in spec.kinds.items()) * self._stage_layers
        matrices = (of_layers / spec.num_layers if of_all else max(products.values())) / self.cut.tensor_parallel
        if of_all:
            vision = spec.vision.block_parameters + spec.vision.projector_parameters if spec.vision else 0
            matrices += self.table + vision / self.cut.tensor_parallel
        return MemoryItem(name="autocast copies", fixed_bytes=self.precision.copy * matrices)


def communicators(ranks: int, peers: int, *, on_cpu: bool) -> MemoryItem:
    """Return the NCCL or HCCL buffers of a rank's peer connections; those of gloo are negligible."""
    if on_cpu or ranks == 1:
        return MemoryItem(name="communicators")
    return MemoryItem(name="communicators", fixed_bytes=_COMMUNICATORS * COMMUNICATOR_BYTES + peers * PEER_BYTES)


# Trained part of a model under adapters or frozen weights: number of parameters, and work of the backward.
#
# Frozen patterns match the names of the weights in transformers.


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
