"""Models whose weights every rank holds whole: as they are, or in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync, drop_gradients

_BUCKET_BYTES = 32 << 20  # large enough to fill a link, small enough for a flat copy


class PlainSync(GradientSync):
    """A model that nothing wraps: starts from rank 0's weights, and its gradients are summed in flat buckets.

    A parameter that got a gradient on some ranks only counts as zero on the others; one that got none anywhere keeps
    none, so that optimizers skip it as they do in one process.
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
        """Make gradients that were summed over ranks already, and are accumulated on, survive another sum.

        All ranks have the same of them, so each keeps its share; those that were set to zero stay that.
        """
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
        """All-reduce one bucket: the gradients, then one flag each for whether any rank has it."""
        present = [parameter.grad is not None for parameter in parameters]
        pieces = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        # In the gradients' own type, so that one message carries both: a count of ranks may round, but never to zero.
        flags = torch.tensor(present, dtype=pieces[0].dtype).to(pieces[0].device, non_blocking=True)
        flat = torch.cat([*pieces, flags])
        self._world.all_reduce_sum(flat)
        *sums, counts = torch.split_with_sizes(flat, [*(p.numel() for p in parameters), len(parameters)])
        # Reading a flag waits for the device, so only a rank that misses a gradient does.
        anywhere = present if all(present) else (counts > 0).tolist()
        for parameter, total, wanted in zip(parameters, sums, anywhere, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif wanted:
                parameter.grad = total.view_as(parameter).clone()  # a view would keep the whole bucket


class DdpSync(PlainSync):
    """DistributedDataParallel, kept from reducing inside any backward: gradients are summed as those of a plain model.

    A rank whose last micro-batch is a ring would issue DDP's reductions between the ring's hops, while another member
    of that ring may have micro-batches left. On a device with fewer hardware queues than streams the reduction then
    holds up the hop that the other member waits for: a deadlock. In waves every rank's last micro-batch is in
    the same wave, but a loop may hold backwards back, and parameters that DDP finds unused are reduced at other places
    among the hops on other ranks, so none is reduced inside a backward there either.

    It gets the effect of DDP's `no_sync`. The context manager itself will not do: the training loop runs between two
    of our calls, and may be left at any point.
    """

    lets_ranks_run_apart = False

    def __init__(self, model: DistributedDataParallel, world: World) -> None:
        _check_reduces_plainly(model)
        super().__init__(model.module, world)
        self._wrapper = model
        self._has_begun = False

    def before_microbatch(self, *, is_last: bool) -> None:
        self._wrapper.require_backward_grad_sync = False
        if not self._has_begun:  # DDP broadcasts its buffers in the first forward after a reduction
            self._wrapper.require_forward_param_sync = True
        self._has_begun = True

    def restore(self) -> None:
        self._wrapper.require_backward_grad_sync = True
        self._has_begun = False


def _buckets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, split when dtype or device changes or a bucket is full; the same on all ranks."""
    bucket: list[nn.Parameter] = []
    held_bytes = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        # A parameter is never cut: the last one of a bucket may exceed its size.
        if bucket and (held_bytes >= _BUCKET_BYTES or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(parameter)
        held_bytes += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _check_reduces_plainly(model: DistributedDataParallel) -> None:
    """Raise RunError if DDP does more to gradients than to average all of them, or cannot be kept from reducing."""
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
