"""What a rank holds whatever its tokens are: weights, gradients, optimizer, and what reducing and updating take.

Symbols: P = parameters of the fullest device, T = those of them that are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fcp_cli.memory.precision import Precision
from fcp_cli.memory.table import Item
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe

PEER_BYTES = 0.47e9  # NCCL's channels to one more rank: 1.06 -> 4.34 GB after 7 peers (NVIDIA/nccl issue 1685)
COMMUNICATOR_BYTES = 0.5e9  # a communicator of all ranks before its first peer


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The share of a model that the fullest device of a rank has.

    Attributes:
        shards: ranks that share one copy of what is shared out.
        tensor_parallel, pipeline_parallel: devices of a rank.
    """

    shards: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


def device_parameters(spec: ModelSpec, cut: Cut) -> float:
    """Count the parameters on the fullest device of a rank; the vision tower is on the first pipeline stage."""
    stages = cut.pipeline_parallel
    vision = spec.vision.parameters if spec.vision else 0
    layers = math.ceil(spec.num_layers / stages) * spec.layer_parameters
    return (layers + table_parameters(spec, cut) + spec.hidden_size + vision) / cut.tensor_parallel


def table_parameters(spec: ModelSpec, cut: Cut) -> int:
    """Count the parameters of the embedding and output tables of one stage."""
    tables = 1 if spec.tied_embeddings or cut.pipeline_parallel > 1 else 2
    return tables * spec.embedding_parameters


def trained_parameters(spec: ModelSpec, recipe: Recipe, cut: Cut) -> float:
    """Count the parameters of a device that have gradients."""
    return device_parameters(replace(spec, vision=None) if recipe.freeze_vision else spec, cut)


def largest_layer(spec: ModelSpec, cut: Cut) -> float:
    """Count the parameters of the largest layer that is gathered at once."""
    return spec.layer_parameters / cut.tensor_parallel


def held_items(spec: ModelSpec, recipe: Recipe, precision: Precision, cut: Cut) -> tuple[Item, ...]:
    """Return what a rank holds through all of a step's micro-batches, once it has run one of them."""
    parameters, trained = device_parameters(spec, cut), trained_parameters(spec, recipe, cut)
    shards, stage = cut.shards, recipe.zero_stage
    if stage <= 1:
        return (
            Item(name="weights", fixed_bytes=precision.weight * parameters),
            Item(name="gradients", fixed_bytes=precision.gradient * trained),
            Item(
                name="optimizer",
                fixed_bytes=(precision.master + precision.moments) * trained / (shards if stage == 1 else 1),
            ),
        )
    # FSDP2 keeps fp32 shards, which the optimizer updates, and gathers copies to compute with.
    shard = max(precision.weight, precision.master)
    gathered, gradients = parameters, trained
    if stage == 3:
        # The root's tables stay from forward to backward; of the layers, one computes while the next one arrives.
        tables = table_parameters(spec, cut) / cut.tensor_parallel
        gathered = tables + 2 * largest_layer(spec, cut)
        if recipe.reduce == "wave":
            gradients = trained / shards
    return (
        Item(name="weights", fixed_bytes=shard * parameters / shards),
        Item(name="gathered weights", fixed_bytes=precision.gathered * gathered),
        Item(name="gradients", fixed_bytes=precision.gradient * gradients),
        Item(name="optimizer", fixed_bytes=precision.moments * trained / shards),
    )


def communicators(ranks: int, peers: int, *, on_cpu: bool) -> Item:
    """Return what back ends hold for the ranks that this one talks to; gloo's sockets take next to nothing."""
    if on_cpu or ranks == 1:
        return Item(name="communicators")
    return Item(name="communicators", fixed_bytes=2 * COMMUNICATOR_BYTES + peers * PEER_BYTES)


def reduction_items(spec: ModelSpec, recipe: Recipe, precision: Precision, cut: Cut) -> tuple[Item, ...]:
    """Return what reducing the gradients takes beside what is held: the flat message of a bucket or of a layer."""
    if recipe.zero_stage <= 1:
        message = max(spec.embedding_parameters, 8 << 20) / cut.tensor_parallel
        return (Item(name="gradient message", fixed_bytes=precision.gradient * message),)
    largest = max(spec.layer_parameters, table_parameters(spec, cut)) / cut.tensor_parallel
    return (Item(name="gradient message", fixed_bytes=precision.gradient * largest * (1 + 1 / cut.shards)),)


def update_items(spec: ModelSpec, recipe: Recipe, precision: Precision, cut: Cut) -> tuple[Item, ...]:
    """Return what the optimizer step takes beside what is held."""
    return ()
