"""Memory of a rank under a recipe, as a table of items at each moment of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fcp_cli.cost.levels import RecomputeLevel, layers_by_level
from fcp_cli.cost.profile import heads_degrees
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory import activations
from fcp_cli.memory.items import MemoryItem, Moment, RankMemory, precision_of
from fcp_cli.memory.state import WHOLE, Cut, State, backward_of, communicators
from fcp_cli.models.layers import LayerKind
from fcp_cli.models.model import ModelSpec
from fcp_cli.plan.metadata import Sync


@lru_cache(maxsize=256)  # a recipe search needs it for the fit and again for the profile
def rank_memory(
    spec: ModelSpec,
    recipe: Recipe,
    *,
    sync: Sync,
    ranks: int,
    cut: Cut = WHOLE,
    on_cpu: bool = False,
    peers: int = 0,
    sharing: int = 1,
) -> RankMemory:
    """Return the memory of a rank's fullest device in a step of several micro-batches.

    Args:
        recipe: settings of the job.
        sync: sync of the plan; under `iteration`, gradients are reduced once per step.
        ranks: number of ranks of the job.
        cut: model-parallel sharding.
        on_cpu: whether the job runs on CPUs, without device communicators.
        peers: peers of a rank, whose connections take device memory.
        sharing: largest Ulysses degree; beyond the number of key/value heads it replicates them.
    """
    state = State(
        spec=spec,
        recipe=replace(recipe, reduce="step") if sync == "iteration" else recipe,
        precision=precision_of(recipe),
        shards=recipe.shards(ranks),
        cut=cut,
    )
    links, copies = communicators(ranks, peers, on_cpu=on_cpu), most_copies(spec, cut, sharing)
    # Lent to all passes in turn, and never freed.
    buffers = max((activations.ring_bytes(spec, kind, state.precision) for kind in spec.kinds), default=0)
    rings = MemoryItem(
        name="ring buffers", bytes_per_token=copies * buffers / cut.tensor_parallel if ranks > 1 else 0.0
    )
    running = _MicroBatch(
        state=state,
        in_rings=ranks > 1,
        held=(*state.held(), links, rings),
        shares_heads=sharing > 1,
        copies=copies,
    )
    moments = [
        *(running.mlp_backward(kind) for kind in spec.kinds),
        *(running.attention_backward(kind) for kind in spec.kinds),
        Moment(name="gradient reduction", items=(*state.reduction(), links, rings)),
    ]
    if cut.pipeline_parallel == 1:
        moments += running.losses()
    if spec.vision is not None:
        moments.append(running.encoder())
    return RankMemory(moments=tuple(moments), forward_moments=tuple(running.forwards()))


def most_copies(spec: ModelSpec, cut: Cut, sharing: int) -> float:
    """Return the most copies of a key/value head within a Ulysses group of up to `sharing` ranks."""
    query_heads, heads = (max(1, count // cut.tensor_parallel) for count in (spec.num_heads, spec.shared_kv_heads))
    return max(1.0, *(u / heads for u in (1, *heads_degrees(query_heads, heads, sharing))))


def saved_bytes(spec: ModelSpec, recipe: Recipe, *, ranks: int) -> float:
    """Return the bytes that a rank copies to its host for a checkpoint; only the ranks of one replica save.

    Counts trained weights, optimizer moments, and frozen weights. Adapters leave frozen weights to the checkpoint that
    they were loaded from.
    """
    shards = recipe.shards(ranks) if recipe.zero_stage else 1
    precision = precision_of(recipe)
    state = State(spec=spec, recipe=recipe, precision=precision, shards=shards)
    frozen = 0.0 if recipe.lora is not None else precision.gathered * (state.parameters - state.trained)
    updated = (max(precision.weight, precision.master) + precision.moments) * state.trained
    return (updated + frozen) / shards


@dataclass(frozen=True, kw_only=True, slots=True)
class _MicroBatch:
    """Moments of memory use within a micro-batch."""

    state: State
    in_rings: bool
    held: tuple[MemoryItem, ...]
    shares_heads: bool
    copies: float

    def mlp_backward(self, kind: LayerKind) -> Moment:
        """Return the peak of a layer's backward, between the matrices of its MLP."""
        spec, recipe, precision = self.state.spec, self.state.recipe, self.state.precision
        again = activations.recomputed_bytes(spec, kind, recipe, precision)
        # Under full recomputation only the current layer has K/V of others; else `_kept` counts those of all layers.
        copies = self._keys_of_others(kind) if recipe.recompute == "full" else 0.0
        layer = again + activations.mlp_backward_bytes(spec, kind, precision) + copies
        items = (self._item("one layer", layer), self.state.new_gradients(), self._copies_of_backward())
        return Moment(name="backward of a layer", items=(*self.held, *self._kept(), *items))

    def attention_backward(self, kind: LayerKind) -> Moment:
        """Return the backward of a layer's attention, after the MLP's activations are freed."""
        spec, recipe, precision = self.state.spec, self.state.recipe, self.state.precision
        gone: float = activations.mlp_side_bytes(spec, kind, precision)
        again = activations.recomputed_bytes(spec, kind, recipe, precision)
        if recipe.recompute == "activation":  # only the MLP recomputes, and its backward has freed the result
            gone, again = gone - again, 0
        elif recipe.recompute == "elementwise":  # products are kept until the end of the layer's backward
            gone -= activations.mlp_product_bytes(spec, kind, precision)
        working: float = activations.attention_backward_bytes(spec, kind, precision, in_rings=self.in_rings)
        # If recomputed, the MLP's activations count as the layer's working memory, not as kept ones.
        if again:
            working, gone = working + again - gone, 0
        if self.shares_heads:  # gradients of replicated K/V: a hop's and their sum
            working += activations.exchanged_bytes(spec, kind, precision)
            working += self._replicated(kind) * 2
        if recipe.recompute == "full":
            working += self._keys_of_others(kind)
        halos = activations.halo_bytes(spec, kind, precision) if self.in_rings else 0
        items = (
            self._item("one layer", working),
            self._item("halo buffers", self.copies * halos),
            self.state.new_gradients(),
            self._copies_of_backward(),
        )
        return Moment(name="backward of attention", items=(*self.held, *self._kept(gone), *items))

    def losses(self) -> list[Moment]:
        """Return the moments of the loss."""
        spec, precision = self.state.spec, self.state.precision
        norm = activations.final_norm_bytes(spec, precision)
        if self.state.recipe.loss == "plain":
            head = self._item("loss head", norm + activations.plain_loss_bytes(spec, precision))
            return [Moment(name="loss head", items=(*self.held, *self._kept(), head, self._copies_of_backward()))]
        gradient, logits, most = activations.chunked_loss_bytes(spec, precision)
        block = self._item("logits", logits, most_bytes=most)
        kept = (*self.held, *self._kept(), self._item("loss head", norm))
        forward = (block, self.state.copies(of_all=True))
        backward = (block, self._item("loss head", gradient), self.state.head_gradient(), self._copies_of_backward())
        return [
            Moment(name="loss head, forward", items=(*kept, *forward)),
            Moment(name="loss head", items=(*kept, *backward)),
        ]

    def encoder(self) -> Moment:
        """Return the moment of the vision encoder, before or after the language model."""
        spec, recipe, precision = self.state.spec, self.state.recipe, self.state.precision
        block = self._item("encoder block", activations.vision_block_bytes(spec, recipe, precision))
        kept = self._item("visual tokens", activations.vision_bytes(spec, recipe, precision))
        return Moment(name="vision encoder", items=(*self.held, kept, block, self.state.new_gradients()))

    def forwards(self) -> list[Moment]:
        """Return the moments of a forward-only pass, which frees the activations of each layer at its end."""
        spec, recipe, precision = self.state.spec, self.state.recipe, self.state.precision
        held = (
            *self.held,
            self._item("micro-batch", activations.input_bytes(spec, precision)),
            self.state.copies(of_all=True),
        )
        saved = activations.saved_pair_bytes(spec, precision) if self.in_rings else 0
        copies = max(map(self._replicated, spec.kinds))
        layer = activations.layer_forward_bytes(spec, precision, in_rings=self.in_rings) + copies
        items = (self._item("one layer", layer), self._item("saved keys and values", self.copies * saved))
        moments = [Moment(name="forward of a layer", items=(*held, *items))]
        if self.state.cut.pipeline_parallel == 1:
            norm = self._item("loss head", activations.final_norm_bytes(spec, precision))
            _, size, most = activations.chunked_loss_bytes(spec, precision)
            if recipe.loss == "plain":
                size, most = activations.plain_loss_bytes(spec, precision), math.inf
            logits = self._item("logits", size, most_bytes=most)
            moments.append(Moment(name="loss head, forward", items=(*held, norm, logits)))
        if spec.vision is not None:
            block = spec.vision.merge_size**2 * activations.patch_bytes(spec.vision, precision)
            moments.append(Moment(name="vision encoder", items=(*held, self._item("encoder block", block))))
        return moments

    def _kept(self, gone: float = 0.0) -> tuple[MemoryItem, ...]:
        """Return the activations that autograd keeps for all layers, minus the `gone` bytes that backward has freed.

        Pipeline parallelism does not reduce them: the first stage has 1/P of the layers and P micro-batches in flight.
        """
        spec, recipe, precision = self.state.spec, self.state.recipe, self.state.precision
        # Layers below the first trained weight keep no activations.
        reached = backward_of(spec, recipe).layers
        kept = sum(
            count
            * reached
            * (
                activations.kept_bytes(spec, kind, recipe, precision)
                + (0 if recipe.recompute == "full" else self._keys_of_others(kind))
            )
            for kind, count in spec.kinds.items()
        )
        layers = kept - gone
        return (
            self._item("layer inputs" if recipe.recomputes_layers else "activations", layers),
            *self._states(reached),
            self._item("visual tokens", activations.vision_bytes(spec, recipe, precision)),
            self._item("micro-batch", activations.input_bytes(spec, precision)),
        )

    def _keys_of_others(self, kind: LayerKind) -> float:
        """Return the bytes per token of saved keys and values on top of the rank's own: replicated, or of a ring."""
        received = activations.received_bytes(self.state.spec, kind, self.state.recipe, self.state.precision)
        return self._replicated(kind) + (received if self.in_rings else 0)

    def _replicated(self, kind: LayerKind) -> float:
        return activations.replicated_bytes(self.state.spec, kind, self.state.precision, self.copies)

    def _states(self, reached: float) -> tuple[MemoryItem, ...]:
        """Return the states that state layers keep in rings, for a pack of one sequence."""
        spec, recipe = self.state.spec, self.state.recipe
        found = [
            (count, *activations.state_bytes(spec, kind, precision_of(recipe)))
            for kind, count in spec.kinds.items()
            if kind.keeps_state
        ]
        if not found or not self.in_rings:
            return ()
        # Under full recomputation only the current layer has states.
        layers = 1.0 if recipe.recompute == "full" else reached * sum(count for count, _, _ in found)
        _, of_sequence, of_token = found[0]
        tensor = self.state.cut.tensor_parallel
        fixed, each = layers * of_sequence / tensor, layers * of_token / tensor
        return (MemoryItem(name="states in rings", fixed_bytes=fixed, bytes_per_token=each),)

    def _copies_of_backward(self) -> MemoryItem:
        return self.state.copies(of_all=not self.state.recipe.recomputes_layers)

    def _item(self, name: str, bytes_per_token: float, *, most_bytes: float = math.inf) -> MemoryItem:
        tensor = self.state.cut.tensor_parallel
        return MemoryItem(name=name, bytes_per_token=bytes_per_token / tensor, most_bytes=most_bytes / tensor)


# Peak memory of a rank with as-needed recomputation, by the tokens of its micro-batch.


def as_needed_bytes(
    spec: ModelSpec,
    recipe: Recipe,
    levels: Sequence[RecomputeLevel],
    tokens: int,
    memory_of: Callable[[Recipe], RankMemory],
) -> float:
    """Return the peak memory in bytes of a rank whose first layers may recompute at a higher level than the others.

    It is the maximum of two moments: the start of the backward, when all layers hold their kept activations (the first
    ones fewer), and the start of the backward of the first layers, when the later layers have been freed.

    Args:
        spec: model; its layers are assumed to keep equal bytes.
        recipe: recipe of the plan.
        levels: levels of the plan's profile; the tokens select one or two of them.
        tokens: tokens of the rank in the micro-batch.
        memory_of: returns the memory of a rank if all layers follow a recipe.
    """
    number, count = layers_by_level(levels, tokens, spec.num_layers)
    # Clamped: at level 0 all layers use it, and there is no lower one.
    pair = [replace(recipe, recompute=levels[max(place, 0)].recompute) for place in (number - 1, number)]
    memories = [memory_of(one) for one in pair]
    low, high = (memory.total_bytes(tokens) for memory in memories)
    if count == spec.num_layers:
        return high
    of_low, of_high = (tokens * memory.kept_bytes_per_token / spec.num_layers for memory in memories)
    return max(low - count * (of_low - of_high), high - (spec.num_layers - count) * of_high)
