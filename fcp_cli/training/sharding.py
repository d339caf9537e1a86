"""Where a model's weights, gradients and activations are held in the bundled trainer.

Shard and replica groups of ranks for every ZeRO stage; replicas for stages 0 and 1 (`weights.shard_model` shards with
FSDP2 from stage 2); and which micro-batches offload activations to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fcp_cli.cost.model import PCIE_BYTES_PER_SECOND, profiled_offload_cost
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.fitting import JobRanks, sharing_ranks
from fcp_cli.memory.items import RESERVE_FRACTION, precision_of
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runtime import ActivationOffload
from fcp_cli.runtime.gradients import GradientSync, present_anywhere
from fcp_cli.runtime.transport import World

# Names since torch 2.13, in which the older ones are deprecated.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_BUCKET_NUMBERS = 8 << 20  # 32 MiB in fp32: large enough to saturate a link, small enough to copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """This rank's shard and replica.

    Attributes:
        index: shard index of this rank.
        count: number of shards per replica; 1: not sharded.
        copy: replica index of this rank.
        mesh: device mesh for `fully_shard`, with dimension `shard`, or `replicate` and `shard`; None if not sharded.
    """

    index: int = 0
    count: int = 1
    copy: int = 0
    mesh: DeviceMesh | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks of this replica; None if not sharded."""
        return None if self.mesh is None else self.mesh.get_group("shard")

    @property
    def copy_group(self) -> dist.ProcessGroup | None:
        """Ranks with the same shard in all replicas; None if there is one replica."""
        if self.mesh is None:
            return dist.group.WORLD
        return self.mesh.get_group("replicate") if "replicate" in (self.mesh.mesh_dim_names or ()) else None

    def rows(self, total: int) -> slice:
        """Return this rank's rows out of `total`, split like `fully_shard`: the last shards may have fewer."""
        each = rows_each(total, self.count)
        return slice(min(self.index * each, total), min((self.index + 1) * each, total))


def rows_each(total: int, count: int) -> int:
    """Return the rows per shard; the last shards may have fewer or none."""
    return -(-total // count)


def open_shares(recipe: Recipe, *, rank: int, ranks: int, device_type: str) -> Shares:
    """Create the process groups for a recipe; consecutive ranks form a replica. Collective."""
    if recipe.zero_stage == 0:
        return Shares(copy=rank)
    count = recipe.shards(ranks)
    if count == ranks:
        mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device_type, (ranks // count, count), mesh_dim_names=("replicate", "shard"))
    return Shares(index=rank % count, count=count, copy=rank // count, mesh=mesh)


@dataclass(kw_only=True, slots=True)
class _Weight:
    """A parameter of a replica.

    Attributes:
        parameter: the model's parameter, unsharded.
        updated: tensor that the optimizer updates: the parameter itself, a view of its rows, or an fp32 copy.
        rows: rows per shard.
        gradient: gradient accumulated in fp32, if the parameter's dtype is too coarse.
    """

    parameter: nn.Parameter
    updated: nn.Parameter
    rows: int
    gradient: Tensor | None = None

    @property
    def share_numbers(self) -> int:
        """Number of elements of a shard, including padding."""
        return self.rows * (self.parameter.numel() // max(len(self.parameter), 1))


class Replica(GradientSync):
    """A model replicated on every rank, with a replicated or sharded (ZeRO-1) optimizer.

    Gradients are accumulated unsharded, in fp32 or better. After the rank's last micro-batch, each shard is reduced
    over all ranks to the rank that updates it, whose weights are then gathered by its replica.

    Args:
        model: model on the device, in fp32 or fp64; weights are broadcast from rank 0.
        world: all ranks.
        shares: shard that this rank's optimizer updates.
        weight_dtype: compute dtype; if it differs from the model's, the optimizer keeps master weights.

    Attributes:
        weights: this rank's shard of each parameter by name, in the optimizer's precision.
        trained: shards that the optimizer updates.
    """

    def __init__(self, model: nn.Module, world: World, shares: Shares, weight_dtype: torch.dtype | None = None) -> None:
        self._shares = shares
        self._world = world
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                world.broadcast(tensor.data)
            held = {name: self._cut(parameter, weight_dtype) for name, parameter in model.named_parameters()}
        self._held = tuple(held.values())
        self._trained = tuple(weight for weight in self._held if weight.parameter.requires_grad)
        self._messages = tuple(_buckets(self._trained))
        self.weights: Mapping[str, Tensor] = {name: weight.updated for name, weight in held.items()}
        self.trained: Sequence[nn.Parameter] = [weight.updated for weight in self._trained]
        for weight in self._trained:
            if weight.parameter.dtype != weight.updated.dtype:
                parameter: Any = weight.parameter
                parameter.register_post_accumulate_grad_hook(_accumulate_into(weight))

    def _cut(self, parameter: nn.Parameter, dtype: torch.dtype | None) -> _Weight:
        """Return the tensor to update for a parameter, which is converted to its compute dtype."""
        whole, own = parameter.data, self._shares.rows(len(parameter))
        rows = whole[own]
        if dtype is not None and dtype != whole.dtype:
            parameter.data = whole.to(dtype)
            if not parameter.requires_grad:
                rows = parameter.data[own]
            elif self._shares.count > 1:
                rows = rows.clone()  # else other shards' fp32 weights would stay allocated
        is_whole = self._shares.count == 1 and rows.dtype == parameter.dtype
        updated = parameter if is_whole else nn.Parameter(rows, requires_grad=parameter.requires_grad)
        return _Weight(parameter=parameter, updated=updated, rows=rows_each(len(parameter), self._shares.count))

    @torch.no_grad()
    def reduce(self) -> None:
        """Set the reduced gradient of each updated weight, and free the model's gradients."""
        wanted = present_anywhere(map(_gradient, self._trained), self._world, self._trained[0].parameter.device)
        for bucket in self._messages:
            self._reduce(bucket)
        for weight, has_gradient in zip(self._trained, wanted, strict=True):
            if not has_gradient:
                weight.updated.grad = None  # as in a single process, so that the optimizer skips it

    def drop(self) -> None:
        for weight in self._trained:
            weight.updated.grad = None

    def _reduce(self, bucket: Sequence[_Weight]) -> None:
        flat = self._flat_gradients(bucket)
        if self._shares.shard_group is None:
            own = flat
        else:
            own = flat.new_empty(len(flat) // self._shares.count)
            _reduce_scatter(own, flat, group=self._shares.shard_group)
        del flat
        if self._shares.copy_group is not None:
            dist.all_reduce(own, group=self._shares.copy_group)
        offset = 0
        for weight in bucket:
            size = weight.updated.numel()
            weight.updated.grad = own[offset : offset + size].view_as(weight.updated)
            offset += weight.share_numbers

    def _flat_gradients(self, bucket: Sequence[_Weight]) -> Tensor:
        """Flatten and free a bucket's gradients, shard after shard; each shard is a message."""
        count = self._shares.count
        only = _gradient(bucket[0])
        if len(bucket) == 1 and only is not None and only.is_contiguous() and len(only) % count == 0:
            _take_gradient(bucket[0])
            return only.view(-1)
        like = bucket[0].updated
        flat = like.new_zeros(count, sum(weight.share_numbers for weight in bucket))
        offset = 0
        for weight in bucket:
            gradient = _take_gradient(weight)
            if gradient is not None:
                for block, part in _shares_of(gradient.contiguous(), flat, offset, weight):
                    block.copy_(part)
            offset += weight.share_numbers
        return flat.view(-1)

    @torch.no_grad()
    def gather(self, *, frozen: bool = False) -> None:
        """Copy weights updated by the optimizer, or loaded from a checkpoint, to the model on all ranks.

        Args:
            frozen: whether to include frozen weights.
        """
        if self._shares.shard_group is None:
            for weight in self._trained:
                if weight.updated is not weight.parameter:
                    weight.parameter.copy_(weight.updated)
            return
        for bucket in _buckets(self._held) if frozen else self._messages:
            self._gather_bucket(bucket, self._shares.shard_group)

    def _gather_bucket(self, bucket: Sequence[_Weight], group: dist.ProcessGroup) -> None:
        """All-gather the updated rows into the forward weights."""
        count, first = self._shares.count, bucket[0].parameter
        if len(bucket) == 1 and len(first) % count == 0:
            _all_gather(first.data, bucket[0].updated.to(first.dtype), group=group)
            return
        own = first.new_zeros(sum(weight.share_numbers for weight in bucket))
        flat = first.new_empty(count, len(own))
        offset = 0
        for weight in bucket:
            own[offset : offset + weight.updated.numel()].copy_(weight.updated.flatten())
            offset += weight.share_numbers
        _all_gather(flat.view(-1), own, group=group)
        offset = 0
        for weight in bucket:
            for block, part in _shares_of(weight.parameter.data, flat, offset, weight):
                part.copy_(block)
            offset += weight.share_numbers


def _accumulate_into(weight: _Weight) -> Callable[[Tensor], None]:
    """Return a hook that accumulates a gradient in the optimizer's precision as soon as it is computed."""

    def accumulate(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if weight.gradient is None:
            weight.gradient = parameter.grad.to(weight.updated.dtype)
        else:
            weight.gradient.add_(parameter.grad)
        parameter.grad = None

    return accumulate


def _gradient(weight: _Weight) -> Tensor | None:
    return weight.parameter.grad if weight.gradient is None else weight.gradient


def _take_gradient(weight: _Weight) -> Tensor | None:
    gradient = _gradient(weight)
    weight.gradient = weight.parameter.grad = None
    return gradient


def _shares_of(whole: Tensor, flat: Tensor, offset: int, weight: _Weight) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (slice of flat [shards, elements], shard of the tensor) pairs of equal shape."""
    size = weight.share_numbers
    full = len(whole) // weight.rows
    yield flat[:full, offset : offset + size], whole[: full * weight.rows].view(full, size)
    rest = whole[full * weight.rows :].flatten()
    if len(rest):
        yield flat[full, offset : offset + len(rest)], rest


def _buckets(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """Yield weights per message: a large one alone as a view, small ones of equal dtypes together."""
    small: dict[tuple[torch.dtype, torch.dtype], list[_Weight]] = {}
    for weight in weights:
        if weight.parameter.numel() >= _BUCKET_NUMBERS:
            yield [weight]
            continue
        kind = (weight.parameter.dtype, weight.updated.dtype)
        bucket = small.setdefault(kind, [])
        bucket.append(weight)
        if sum(held.parameter.numel() for held in bucket) >= _BUCKET_NUMBERS:
            yield small.pop(kind)
    yield from small.values()


# Activation offload: of the micro-batches that would not fit otherwise.


def open_offload(recipe: Recipe, model: str, metadata: PlanMetadata, device: torch.device) -> ActivationOffload | None:
    """Return the activation offloader of a run, or None if the recipe does not offload.

    Args:
        recipe: recipe of the run.
        model: model name for `load_model`.
        metadata: plan metadata.
        device: device of this rank. On a CPU, all micro-batches are offloaded, as a rehearsal.
    """
    if recipe.offload == "none":
        return None
    if device.type == "cpu":
        return ActivationOffload(device)
    total_bytes = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    place = JobRanks(
        num_ranks=metadata.num_ranks,
        ranks_per_node=metadata.ranks_per_node,
        capacity_bytes=total_bytes * (1 - RESERVE_FRACTION),
        sharing=sharing_ranks(metadata.attention, metadata),
    )
    return ActivationOffload(device, above_tokens=tokens_without_offload(recipe, model, metadata, place))


def describe_offload(above_tokens: int, recipe: Recipe, model: str, metadata: PlanMetadata) -> str:
    """Describe which micro-batches are offloaded and, if the profile can price it, the cost of the longest."""
    longer = f" of more than {above_tokens} tokens per rank" if above_tokens else ""
    words = f"layer inputs are offloaded to host memory in micro-batches{longer}"
    if not metadata.cost_profile:
        return words
    spec, tokens = load_model(model), metadata.tokens_per_rank
    cost = profiled_offload_cost(
        parse_cost_profile(metadata.cost_profile, name="the plan's cost profile"),
        tokens=tokens,
        layers=spec.num_layers,
        input_bytes_per_token=precision_of(recipe).residual * spec.hidden_size,
    )
    return (
        f"{words}; with {tokens} tokens they are {cost.moved_bytes / 2e9:.1f} GB each way, and layers hide "
        f"{cost.hidden_seconds:.2f} of {cost.copy_seconds:.2f} s (estimate, {PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s)"
    )


def tokens_without_offload(recipe: Recipe, model: str, metadata: PlanMetadata, place: JobRanks) -> int:
    """Return the maximum tokens per rank of a micro-batch whose activations all stay on the device."""
    memory = place.memory(load_model(model), replace(recipe, offload="none"), metadata.sync)
    return memory.tokens(place.capacity_bytes)
