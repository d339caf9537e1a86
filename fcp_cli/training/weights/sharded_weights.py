"""How ranks hold the weights that the bundled trainer trains: whole on every rank, or sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.training.weights.shares import Shares, rows_each

# Of torch 2.13; the names that older ones have are deprecated.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_BUCKET_NUMBERS = 8 << 20  # 32 MiB in fp32: large enough to fill a link, small enough for a copy


class ShardedWeights(Protocol):
    """A model's weights as one rank holds them.

    Attributes:
        shares: this rank's part of the weights that are saved and updated.
        weights: name -> that part of each parameter, in the precision of the optimizer.
        trained: those of them that the optimizer updates.
        followed: module or wrapper whose gradients `Session.steps` reduces.
    """

    shares: Shares
    weights: Mapping[str, Tensor]
    trained: Sequence[nn.Parameter]

    @property
    def followed(self) -> nn.Module | GradientSync: ...

    def gather(self, *, frozen: bool = False) -> None:
        """Copy the weights that the optimizer updated, or a checkpoint loaded, to the model on all ranks.

        Args:
            frozen: weights that are not trained, too.
        """
        ...


class ShardedModel:
    """A model that FSDP2 shards: the optimizer updates its parameters."""

    def __init__(self, model: nn.Module, shares: Shares) -> None:
        self.shares = shares
        self.weights: Mapping[str, Tensor] = dict(model.named_parameters())
        self.trained: Sequence[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.followed = model

    def gather(self, *, frozen: bool = False) -> None:
        """Do nothing: FSDP2 gathers the weights before they are used."""


@dataclass(kw_only=True, slots=True)
class _Weight:
    """One parameter of a replica.

    Attributes:
        parameter: the parameter of the model, whole.
        updated: tensor that the optimizer updates: itself, rows of the same memory, or an fp32 copy.
        rows: the rows of each share.
        gradient: summed so far in fp32, if the parameter's own type is too coarse for sums.
    """

    parameter: nn.Parameter
    updated: nn.Parameter
    rows: int
    gradient: Tensor | None = None

    @property
    def share_numbers(self) -> int:
        """Return the numbers of a share, with padding at the end."""
        return self.rows * (self.parameter.numel() // max(len(self.parameter), 1))


class Replica(GradientSync):
    """A model whose weights every rank holds whole, under an optimizer that is whole, too, or shared out (ZeRO-1).

    Gradients are added up whole and in fp32 or better; after the rank's last micro-batch each share is summed over all
    ranks and goes to the rank that updates it, whose weights are then sent to the others of its copy.

    Args:
        model: the model on the device, in fp32 or fp64, the same on all ranks; its weights start as rank 0's.
        world: all ranks.
        shares: the part that this rank's optimizer updates.
        weight_dtype: the type that the model computes with; if it is not that of the model, the optimizer keeps master
            weights.
    """

    def __init__(self, model: nn.Module, world: World, shares: Shares, weight_dtype: torch.dtype | None = None) -> None:
        self.shares = shares
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

    @property
    def followed(self) -> GradientSync:
        return self

    def _cut(self, parameter: nn.Parameter, dtype: torch.dtype | None) -> _Weight:
        """Return the tensor that the optimizer updates for a parameter, which keeps its compute type."""
        whole, own = parameter.data, self.shares.rows(len(parameter))
        rows = whole[own]
        if dtype is not None and dtype != whole.dtype:
            parameter.data = whole.to(dtype)
            if not parameter.requires_grad:
                rows = parameter.data[own]
            elif self.shares.count > 1:
                rows = rows.clone()  # else the fp32 weights of other shares would stay, too
        is_whole = self.shares.count == 1 and rows.dtype == parameter.dtype
        updated = parameter if is_whole else nn.Parameter(rows, requires_grad=parameter.requires_grad)
        return _Weight(parameter=parameter, updated=updated, rows=rows_each(len(parameter), self.shares.count))

    @torch.no_grad()
    def reduce(self) -> None:
        """Give each updated weight its gradient, summed over all ranks; the model's own gradients are freed."""
        wanted = self._present_anywhere()
        for bucket in self._messages:
            self._reduce(bucket)
        for weight, has_gradient in zip(self._trained, wanted, strict=True):
            if not has_gradient:
                weight.updated.grad = None  # as in one process, so that the optimizer skips it

    def drop(self) -> None:
        for weight in self._trained:
            weight.updated.grad = None

    def _present_anywhere(self) -> list[bool]:
        """Return for each weight whether a rank has a gradient of it."""
        present = [_gradient(weight) is not None for weight in self._trained]
        counts = torch.tensor(present, dtype=torch.float32).to(self._trained[0].parameter.device, non_blocking=True)
        self._world.all_reduce_sum(counts)
        # Reading the counts waits for the device, so only a rank that misses a gradient does.
        return present if all(present) else (counts > 0).tolist()

    def _reduce(self, bucket: Sequence[_Weight]) -> None:
        flat = self._flat_gradients(bucket)
        if self.shares.shard_group is None:
            own = flat
        else:
            own = flat.new_empty(len(flat) // self.shares.count)
            _reduce_scatter(own, flat, group=self.shares.shard_group)
        del flat
        if self.shares.copy_group is not None:
            dist.all_reduce(own, group=self.shares.copy_group)
        offset = 0
        for weight in bucket:
            size = weight.updated.numel()
            weight.updated.grad = own[offset : offset + size].view_as(weight.updated)
            offset += weight.share_numbers

    def _flat_gradients(self, bucket: Sequence[_Weight]) -> Tensor:
        """Return a bucket's gradients, flat, share after share, and free them; each share is a message."""
        count = self.shares.count
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
        if self.shares.shard_group is None:
            for weight in self._trained:
                if weight.updated is not weight.parameter:
                    weight.parameter.copy_(weight.updated)
            return
        for bucket in _buckets(self._held) if frozen else self._messages:
            self._gather_bucket(bucket, self.shares.shard_group)

    def _gather_bucket(self, bucket: Sequence[_Weight], group: dist.ProcessGroup) -> None:
        """All-gather the rows that each rank updated into the weights of the forward."""
        count, first = self.shares.count, bucket[0].parameter
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
    """Return a hook that adds a gradient up in the optimizer's precision, as soon as autograd has it."""

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
    """Yield the positions of a tensor's shares in flat [shares, numbers], and those shares, in equal shapes."""
    size = weight.share_numbers
    full = len(whole) // weight.rows
    yield flat[:full, offset : offset + size], whole[: full * weight.rows].view(full, size)
    rest = whole[full * weight.rows :].flatten()
    if len(rest):
        yield flat[full, offset : offset + len(rest)], rest


def _buckets(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """Yield weights that travel in one message: a large one as a single view; small ones of one type together."""
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
