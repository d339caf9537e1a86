"""Gradient reduction of models with whole weights on every rank: plain, or in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync, drop_gradients

_BUCKET_BYTES = 32 << 20  # large enough for full bandwidth, small enough for a flat copy


class PlainSync(GradientSync):
    """Unwrapped model: starts from rank 0's weights, and its gradients are all-reduced in flat buckets.

    If a parameter has a gradient on some ranks only, it counts as zero on the others. If it has none on any rank, it
    keeps none, so that optimizers skip it as they do in one process.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._model = model
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                world.broadcast(tensor.data)

    def summed(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    @torch.no_grad()
    def begin(self) -> None:
        """Divide accumulated gradients, which are already sums over ranks, by the world size before the next sum."""
        kept = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        if kept:
            torch._foreach_div_(kept, float(self._world.size))

    def drop(self) -> None:
        drop_gradients(self._model)

    @torch.no_grad()
    def reduce(self) -> None:
        for bucket in _buckets(self._model):
            self._reduce(bucket)

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        """All-reduce one bucket: the gradients, then one flag per parameter: whether any rank has its gradient."""
        present = [parameter.grad is not None for parameter in parameters]
        pieces = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        # In the gradients' data type, so that one message carries both: a count of ranks may round, but never to
        # zero.
        flags = torch.tensor(present, dtype=pieces[0].dtype).to(pieces[0].device, non_blocking=True)
        flat = torch.cat([*pieces, flags])
        self._world.all_reduce_sum(flat)
        *sums, counts = torch.split_with_sizes(flat, [*(p.numel() for p in parameters), len(parameters)])
        # Reading the flags waits for the device, so only ranks that lack a gradient do.
        anywhere = present if all(present) else (counts > 0).tolist()
        for parameter, total, wanted in zip(parameters, sums, anywhere, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif wanted:
                parameter.grad = total.view_as(parameter).clone()  # a view would keep the whole bucket


class DdpSync(PlainSync):
    """DistributedDataParallel without reductions inside backwards: gradients are reduced as those of a plain model.

    A rank whose last micro-batch is a ring would issue DDP's reductions between the ring's hops, while another member
    of that ring may have micro-batches left. On a device with fewer hardware queues than streams the reduction then
    blocks the hop that the other member waits for: a deadlock. In waves every rank's last micro-batch is in the same
    wave, but a loop may defer backwards, and DDP reduces unused parameters at different places among the hops on
    different ranks. So nothing is reduced inside a backward there either.

    This has the effect of DDP's `no_sync`. Its context manager is unsuitable, since the training loop runs between two
    of our calls and may be left at any point.
    """

    lets_ranks_run_apart = False

    def __init__(self, model: DistributedDataParallel, world: World) -> None:
        _check_reduces_plainly(model)
        super().__init__(model.module, world)
        self._wrapper = model
        self._has_begun = False

    def before_microbatch(self, *, is_last: bool) -> None:
        self._wrapper.require_backward_grad_sync = False
        if not self._has_begun:  # makes DDP broadcast its buffers in the step's first forward only
            self._wrapper.require_forward_param_sync = True
        self._has_begun = True

    def restore(self) -> None:
        self._wrapper.require_backward_grad_sync = True
        self._has_begun = False


def _buckets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in order; a bucket ends when it is full or dtype or device changes. The same on all ranks."""
    bucket: list[nn.Parameter] = []
    held_bytes = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        # Parameters are not split: the last one of a bucket may exceed its size.
        if bucket and (held_bytes >= _BUCKET_BYTES or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(parameter)
        held_bytes += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _check_reduces_plainly(model: DistributedDataParallel) -> None:
    """Raise RunError if DDP does anything but average all gradients, or cannot be kept from reducing."""
    own: Any = model
    for is_refused, feature in (
        (bool(own._comm_hooks), "a communication hook (or mixed_precision=, which is one), which runs inside backward"),
        (bool(own.parameters_to_ignore), "parameters that it ignores, which would be summed all the same"),
        (own.static_graph, "static_graph=True, whose first reduction runs inside the first backward"),
    ):
        if is_refused:
            raise RunError(
                f"the model's DistributedDataParallel has {feature}; under a plan gradients are summed once a step, "
                "after all backwards: remove it, or give steps() the model without DistributedDataParallel"
            )
