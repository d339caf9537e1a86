"""Sum gradients over all ranks once per step, whatever holds the parameters: nothing, DDP or FSDP2.

No reduction runs inside a backward of which ranks have different numbers: it would wait for ranks that wait for a hop
behind it. FSDP2 averages over ranks where the training objective asks for a sum, so it names a factor that the loss is
multiplied with. It also gathers weights: before each layer where it lets go of them, which needs waves, else once,
before the step's first micro-batch. In waves all ranks gather, hop and reduce in one order, which the order check
proves of recorded runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Sync
from fcp_cli.recipe import Reduce
from fcp_cli.runtime.world import World

_BUCKET_BYTES = 32 << 20  # large enough to fill a link, small enough for a flat copy beside the gradients


class GradientSync:
    """A way to sum the gradients of one kind of model over all ranks. This one leaves the sum to the script.

    `Session.steps(GradientSync())` says so: without it, and without a model, a job of several ranks is stopped.
    """

    loss_factor = 1.0
    """Factor on the loss that makes reduced gradients sums over ranks."""

    def summed(self) -> Iterator[nn.Parameter] | None:
        """Return the parameters whose gradients are summed, sharded and whole; None: whichever the script sums."""
        return None

    def begin(self) -> None:
        """Prepare for a step; called before the first micro-batch, when gradients of steps before may be there."""

    def drop(self) -> None:
        """Let go of all gradients, so that an optimizer changes nothing; called after `reduce`."""

    def before_microbatch(self, *, is_last: bool) -> None:
        """Prepare the model for one micro-batch; called before the forward of each."""

    def reduce(self) -> None:
        """Make gradients sums over all ranks; called after the backward of the step's last micro-batch."""

    def restore(self) -> None:
        """Leave the model as it was found; called when the step is over, finished or given up."""


def gradient_sync(
    model: nn.Module | GradientSync | None, world: World, sync: Sync, reduce: Reduce = "wave"
) -> GradientSync:
    """Return the way to sum a model's gradients; a model may bring its own.

    Args:
        model: that is trained.
        world: all ranks.
        sync: of the plan.
        reduce: when layers that let go of their weights reduce gradients; see `FsdpWaveSync`.

    Raises:
        RunError: the model is wrapped by something that cannot follow this plan.
    """
    if model is None:
        return GradientSync()
    if isinstance(model, GradientSync):
        return model
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    if isinstance(model, DistributedDataParallel):
        return DdpSync(model, world)
    if any(_is_fsdp(module) for module in model.modules()):
        if not _is_fsdp(model):
            raise RunError("only parts of the model are sharded with FSDP2; call fully_shard on the whole model too")
        _check_covers(model, world)
        gathering = _layer_that_gathers_again(model)
        if gathering is None:
            return FsdpStepSync(model, world)
        if sync == "iteration":
            raise RunError(
                f"{gathering} is sharded with FSDP2 and gathers its weights again for every micro-batch, of which "
                "ranks run different numbers under sync iteration; call fully_shard(..., reshard_after_forward=False), "
                "or plan with 'fcp plan --sync microbatch'"
            )
        return FsdpWaveSync(model, world, reduce)
    if type(model).__name__ == "FullyShardedDataParallel":
        raise RunError(
            "FullyShardedDataParallel (FSDP1) cannot follow a plan; shard the model with fully_shard (FSDP2)"
        )
    return PlainSync(model, world)


class FsdpWaveSync(GradientSync):
    """FSDP2 (`fully_shard`) that gathers each layer's weights again: all ranks together, micro-batch by micro-batch.

    Gradients are reduced inside the backward of every wave, which all ranks run equally many of, so that each rank
    holds only its share of them; or inside the last one alone, which sends less, but until then each rank holds them
    whole. Copies of the shards (HSDP) are summed in the last one in either case.
    """

    def __init__(self, model: nn.Module, world: World, reduce: Reduce = "wave") -> None:
        self.loss_factor = float(world.size)
        self._model: Any = model
        self._reduces_waves = reduce == "wave"

    def summed(self) -> Iterator[nn.Parameter]:
        return _sharded_and_whole(self._model)

    def drop(self) -> None:
        _drop_gradients(self._model)

    def before_microbatch(self, *, is_last: bool) -> None:
        self._model.set_requires_gradient_sync(is_last or self._reduces_waves)
        self._model.set_requires_all_reduce(is_last)
        self._model.set_is_last_backward(is_last or self._reduces_waves)

    def restore(self) -> None:
        self._model.set_requires_gradient_sync(True)
        self._model.set_is_last_backward(True)


class FsdpStepSync(GradientSync):
    """FSDP2 that keeps its weights: they are gathered once a step, and gradients are reduced once, at its end.

    Between the two no collective runs, so ranks may run different numbers of micro-batches: ZeRO-2, whose gradients
    are whole on every rank until the step ends. All layers are gathered before the first forward and none inside it:
    a rank in a ring would wait there for a rank whose own gather waits for it.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.loss_factor = float(world.size)
        self._model: Any = model
        self._layers: list[Any] = [module for module in model.modules() if _is_fsdp(module)]
        self._is_gathered = False

    def summed(self) -> Iterator[nn.Parameter]:
        return _sharded_and_whole(self._model)

    def drop(self) -> None:
        _drop_gradients(self._model)

    def before_microbatch(self, *, is_last: bool) -> None:
        if self._is_gathered:
            return
        self._set(False)
        for layer in self._layers:
            layer.unshard()
        self._is_gathered = True

    def reduce(self) -> None:
        """Do what FSDP2 does when its last backward ends, for all layers: reduce-scatter, and let go of the weights."""
        self._set(True)
        # Private, but the only way: by its public ones FSDP2 reduces inside a backward, of which ranks run different
        # numbers.
        self._model._get_fsdp_state()._root_post_backward_final_callback()
        self._is_gathered = False

    def restore(self) -> None:
        self._set(True)
        if self._is_gathered:  # the step was given up: what the optimizer holds are the shards
            for layer in self._layers:
                layer.reshard()
            self._is_gathered = False

    def _set(self, ends: bool) -> None:
        self._model.set_requires_gradient_sync(ends)
        self._model.set_reshard_after_backward(ends)
        self._model.set_is_last_backward(ends)


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
        _drop_gradients(self._model)

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
    holds up the hop that the other member waits for, and neither ends. In waves every rank's last micro-batch is in
    the same wave, but a loop may hold backwards back, and parameters that DDP finds unused are reduced at other places
    among the hops on other ranks, so none is reduced inside a backward there either.

    It gets the effect of DDP's `no_sync`. The context manager itself will not do: the training loop runs between two
    of our calls, and may be left at any point.
    """

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
    """Yield the parameters in order, cut where dtype or device changes or a bucket is full; the same on all ranks."""
    bucket: list[nn.Parameter] = []
    held_bytes = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
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
    for is_refused, what in (
        (bool(own._comm_hooks), "a communication hook (or mixed_precision=, which is one), which runs inside backward"),
        (bool(own.parameters_to_ignore), "parameters that it ignores, which would be summed all the same"),
        (own.static_graph, "static_graph=True, whose first reduction runs inside the first backward"),
    ):
        if is_refused:
            raise RunError(
                f"the model's DistributedDataParallel has {what}; under a plan gradients are summed once a step, after "
                "all backwards: leave it out, or give steps() the model without DistributedDataParallel"
            )


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _sharded_and_whole(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield FSDP2's parameters: shards, and what a forward has in their place, which autograd knows."""
    yield from model.parameters()
    for module in model.modules():
        if not _is_fsdp(module):
            continue
        fsdp: Any = module
        state: Any = fsdp._get_fsdp_state()
        # Of torch 2.13, where a layer may have several; one before.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for held in group.fsdp_params if group is not None else ():
                if hasattr(held, "_unsharded_param"):  # made when it is first gathered
                    yield held._unsharded_param


def _is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _check_covers(model: nn.Module, world: World) -> None:
    """Raise RunError if a parameter is sharded over fewer ranks than the plan has: its gradients would miss others."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        covered = mesh.size() if mesh is not None else 1
        if covered != world.size:
            raise RunError(
                f"the parameter {name} is sharded by FSDP2 over {covered} of {world.size} ranks; "
                "give fully_shard a mesh of all ranks"
            )


def _layer_that_gathers_again(model: nn.Module) -> str | None:
    """Return the first FSDP2 layer that lets go of its weights after its forward, to gather them again."""
    for name, module in model.named_modules():
        if not _is_fsdp(module):
            continue
        state: Any = module._get_fsdp_state()
        # The root keeps its weights by default, but records so only at its first forward.
        undecided = module is model and getattr(state, "_auto_reshard_after_forward", True)
        group = state._fsdp_param_group
        if group is not None and group.post_forward_mesh_info is not None and not undecided:
            return name or "the model"
    return None
