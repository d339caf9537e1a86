"""What a rank holds for what will really run, as a table of items."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fcp_cli.memory.activations import (
    kept_bytes,
    layer_working_bytes,
    loss_bytes,
    ring_bytes,
    vision_bytes,
)
from fcp_cli.memory.precision import Precision, precision_of
from fcp_cli.memory.state import Cut, communicators, device_parameters, held_items, reduction_items, update_items
from fcp_cli.memory.table import Item, Moment, RankMemory
from fcp_cli.models.model import ModelSpec
from fcp_cli.plan.metadata import Sync
from fcp_cli.recipe import Recipe


def rank_memory(
    spec: ModelSpec,
    recipe: Recipe,
    *,
    sync: Sync,
    ranks: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    on_cpu: bool = False,
    peers: int = 0,
) -> RankMemory:
    """Return what the fullest device of a rank holds in a step of several micro-batches.

    Args:
        spec: the model.
        recipe: the settings that the job runs with.
        sync: the plan's; under `iteration`, gradients are reduced once a step.
        ranks: of the job; a rank is tensor_parallel x pipeline_parallel devices.
        tensor_parallel, pipeline_parallel: the cut of a rank.
        on_cpu: the job runs on hosts: no device communicators.
        peers: ranks that one meets in rings, whose channels take memory on accelerators.
    """
    precision = precision_of(recipe)
    cut = Cut(
        shards=recipe.shards(ranks),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    if sync == "iteration":
        recipe = replace(recipe, reduce="step")
    held = (*held_items(spec, recipe, precision, cut), communicators(ranks, peers, on_cpu=on_cpu))
    running = _Running(spec=spec, recipe=recipe, precision=precision, cut=cut)
    moments = [
        Moment(name="backward of a layer", items=(*held, *running.kept(), *running.layer(ranks))),
        Moment(name="gradient reduction", items=(*held, *reduction_items(spec, recipe, precision, cut))),
        Moment(name="optimizer step", items=(*held, *update_items(spec, recipe, precision, cut))),
    ]
    if pipeline_parallel == 1:
        moments.append(Moment(name="loss head", items=(*held, *running.kept(), *running.loss())))
    return RankMemory(moments=tuple(moments))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """The items of a micro-batch that runs."""

    spec: ModelSpec
    recipe: Recipe
    precision: Precision
    cut: Cut

    def kept(self) -> tuple[Item, ...]:
        """Return what autograd keeps of all layers.

        Pipeline parallelism does not lower it: the first stage has a share 1/P of the layers and P micro-batches in
        flight.
        """
        spec, recipe, precision = self.spec, self.recipe, self.precision
        layers = spec.num_layers * kept_bytes(spec, recipe, precision)
        name = "activations" if recipe.recompute == "none" else "layer inputs"
        copies = precision.copy * device_parameters(spec, self.cut)
        return (
            self._item(name, layers),
            self._item("visual tokens", vision_bytes(spec, recipe, precision)),
            Item(name="autocast copies", fixed_bytes=copies),
        )

    def layer(self, ranks: int) -> tuple[Item, ...]:
        """Return the layer at work in its backward, and the ring's buffers where there are rings."""
        working = layer_working_bytes(self.spec, self.recipe, self.precision)
        ring = ring_bytes(self.spec, self.precision) if ranks > 1 else 0
        return self._item("one layer", working), self._item("ring buffers", ring)

    def loss(self) -> tuple[Item, ...]:
        fixed, per_token = loss_bytes(self.spec, self.recipe, self.precision)
        tensor = self.cut.tensor_parallel
        return (Item(name="loss head", fixed_bytes=fixed / tensor, bytes_per_token=per_token / tensor),)

    def _item(self, name: str, bytes_per_token: float) -> Item:
        return Item(name=name, bytes_per_token=bytes_per_token / self.cut.tensor_parallel)
