"""Token-independent memory of a rank: weights, gradients, optimizer state, and reduction buffers.

From ZeRO stage 2 on, weights are sharded by FSDP2, whose units are the layers and a root with all other parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from fcp_cli.memory.precision import Precision
from fcp_cli.memory.table import MemoryItem
from fcp_cli.memory.trained import Trained, trained_parameters
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe

PEER_BYTES = 0.47e9  # NCCL's channels per peer: 1.06 -> 4.34 GB after 7 peers (NVIDIA/nccl issue 1685)
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
            # Large gradients are reduced in place, without a bucket; only the reduced shard is new.
            shares = self.shards if self.recipe.zero_stage == 1 else 1
            share = self.trained_table / shares if shares > 1 else 0.0
            return (*self.held(), MemoryItem(name="gradient message", fixed_bytes=precision.gradient * share))
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
