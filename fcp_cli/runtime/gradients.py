"""Reduce gradients over all ranks once per step, for plain modules, DDP, FSDP2 and DeepSpeed.

No reduction runs inside backwards of which ranks have different numbers: it would wait for ranks that wait for a hop
issued after it. Reducers that average over ranks, although the training objective is a sum, provide a factor to
multiply the loss with.

`gradient_sync` selects the reducer of a model; `reducing_module` finds the wrapper that reduces its gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fcp_cli.cost.recipe import GRADIENT_BUCKET_BYTES, GRADIENT_BUCKETS, Phase, PrecisionName, Reduce
from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.plan_agreement import NO_TRAINING
from fcp_cli.runtime.transport import World

WEIGHT_DTYPES: Mapping[PrecisionName, torch.dtype] = {
    "bf16": torch.bfloat16,  # a copy: the optimizer updates fp32 weights
    "amp": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Data type of the weights that a model computes with, by the recipe's precision."""


class GradientSync:
    """Gradient reducer of one kind of model; this base class leaves the reduction to the script.

    Pass it as `Session.steps(GradientSync())`. With neither it nor a model, a job of several ranks raises.
    """

    loss_factor = 1.0
    """Factor on the loss that turns averaged gradients into sums over ranks; valid after `before_microbatch`."""

    trains = True
    """Whether micro-batches have a backward; False under a plan of forward passes."""

    lets_ranks_run_apart = True
    """Whether a rank may run other modules and separate backwards while others run the whole model."""

    def summed(self) -> Iterator[nn.Parameter] | None:
        """Return the parameters with reduced gradients, sharded and unsharded, or None if the script reduces them."""
        return None

    def begin(self) -> None:
        """Prepare for a step. Called before its first micro-batch; gradients of earlier steps may still be present."""

    def drop(self) -> None:
        """Drop all gradients, so that an optimizer changes nothing. Called after `reduce`."""

    def before_microbatch(self, *, is_last: bool) -> None:
        """Prepare the model for one micro-batch. Called before each forward."""

    def reduce(self) -> None:
        """Turn gradients into sums over all ranks. Called after the backward of the step's last micro-batch."""

    def finish(self) -> None:
        """Act on the final gradients. Called after `reduce`, and after `drop` if the step is skipped."""

    def restore(self) -> None:
        """Restore the model's original state. Called when the step ends, finished or abandoned."""


def drop_gradients(model: nn.Module) -> None:
    """Drop the gradients of all parameters of a model."""
    for parameter in model.parameters():
        parameter.grad = None


def gradient_sync(
    model: nn.Module | GradientSync | None,
    world: World,
    sync: Sync,
    reduce: Reduce = "wave",
    phase: Phase | None = None,
) -> GradientSync:
    """Return the gradient reducer of a model; a `GradientSync` is returned as is.

    Args:
        model: the trained model.
        world: all ranks.
        sync: the plan's sync mode.
        reduce: when a reducer that shards gradients reduces them; see `FsdpWaveSync`.
        phase: the plan's phase; in `forward` there are no gradients.
    """
    if phase == "forward":
        return forward_sync(model, world, sync)
    if model is None:
        return GradientSync()
    if isinstance(model, GradientSync):
        return model
    part = reducing_module(model)
    if isinstance(part, DistributedDataParallel):
        return DdpSync(part, world)
    if isinstance(part, FSDPModule):
        return fsdp_sync(part, world, sync, reduce)
    if is_deepspeed_engine(part):
        return engine_sync(part, world, sync, reduce)
    return PlainSync(part, world)


# Find the wrapper that reduces a model's gradients, which may be nested in further wrappers.
#
# Frameworks put shells around it (torch.compile, Lightning's Fabric, a module of the script's own). The trained
# parameters still belong to the wrapper, so a plan must control the wrapper.

_FSDP1 = "FullyShardedDataParallel"
_WITHOUT_IT = "give steps() the model that it wraps, or wrap it in DistributedDataParallel or with fully_shard"


def reducing_module(model: nn.Module) -> nn.Module:
    """Return the module that reduces all trained parameters' gradients, or the model itself if none does."""
    found = [(name, part) for name, part in _outermost(model) if any(p.requires_grad for p in part.parameters())]
    if not found:
        _check_is_whole(model)
        return model
    for name, part in found:
        refused = _why_not(part)
        if refused:
            raise RunError(f"{_named(name)} {refused}")
    name, part = found[0]
    inside = {id(parameter) for parameter in part.parameters()}
    outside = [other for other, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside and isinstance(part, FSDPModule):
        raise RunError("only parts of the model are sharded with FSDP2; call fully_shard on the whole model too")
    if outside:
        raise RunError(
            f"{_named(name)} is a {type(part).__name__}, which does not hold the parameter {outside[0]}"
            f"{f' and {len(outside) - 1} more' if len(outside) > 1 else ''}; wrap the whole model, or freeze them"
        )
    return part


def is_deepspeed_engine(module: nn.Module) -> bool:
    """Return whether a module is a DeepSpeed engine, without importing DeepSpeed."""
    return _has_base(module, "deepspeed", "DeepSpeedEngine")


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that reduce gradients, each once."""
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if _reduces(module):
            seen.update(module.modules())  # Fabric's shell has both the wrapper and the wrapped module as children
            yield name, module
        else:
            waiting.extend((f"{name}.{child}".lstrip("."), part) for child, part in module.named_children())


def _reduces(module: nn.Module) -> bool:
    """Return whether a module reduces gradients in its own backward, judged by its switches to disable that."""
    switches = (getattr(type(module), name, None) for name in ("no_sync", "set_requires_gradient_sync"))
    return isinstance(module, DataParallel) or type(module).__name__ == _FSDP1 or any(map(callable, switches))


def _why_not(part: nn.Module) -> str:
    """Return the reason why a gradient-reducing module cannot follow a plan, or ""."""
    own = f"is a {type(part).__name__} of {type(part).__module__.partition('.')[0]}"
    if type(part).__name__ == _FSDP1:
        return f"is a {_FSDP1} (FSDP1), which cannot follow a plan; shard the model with fully_shard (FSDP2)"
    if _has_base(part, "deepspeed", "PipelineEngine"):
        return f"{own}, which runs micro-batches of its own; plans with pipeline parallelism are for Megatron"
    if isinstance(part, (FSDPModule, DistributedDataParallel)) or is_deepspeed_engine(part):
        nested = next((inner for inner in part.modules() if inner is not part and _reduces(inner)), None)
        if nested is None or (isinstance(part, FSDPModule) and isinstance(nested, FSDPModule)):
            return ""
        return f"{own} around a {type(nested).__name__}: both reduce gradients; keep one of them"
    return f"{own}, which reduces gradients by itself, and fcp does not know when; {_WITHOUT_IT}"


def _check_is_whole(model: nn.Module) -> None:
    """Raise RunError if a plain model's parameters are shards or belong to a DeepSpeed engine."""
    for name, parameter in model.named_parameters():
        own: Any = parameter
        if hasattr(own, "ds_id") or hasattr(own, "_hp_mapping") or hasattr(own, "param_idx_in_group"):
            raise RunError(f"the parameter {name} belongs to a DeepSpeed engine; give steps() the engine")
        if hasattr(own, "device_mesh"):
            raise RunError(
                f"the parameter {name} is a DTensor over {own.device_mesh.size()} ranks that fully_shard did not make; "
                "a plan's loop has no tensor parallelism: shard the model with fully_shard alone"
            )


def _has_base(module: nn.Module, package: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] == package for base in type(module).__mro__)


def _named(name: str) -> str:
    return f"the model's part {name}" if name else "the model"


# Models with whole weights on every rank: plain, or in DistributedDataParallel.


class PlainSync(GradientSync):
    """Unwrapped model: starts from rank 0's weights, and its gradients are all-reduced in flat buckets.

    While one bucket is summed, the next is filled; a gradient larger than a bucket is summed in place.

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
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if not trained:
            return
        present = present_anywhere([parameter.grad for parameter in trained], self._world, trained[0].device)
        wanted = {parameter for parameter, is_present in zip(trained, present, strict=True) if is_present}
        in_flight: deque[_Bucket] = deque()
        for parameters in _buckets(trained):
            if len(in_flight) == GRADIENT_BUCKETS:
                in_flight.popleft().finish(wanted)
            in_flight.append(_Bucket(parameters, self._world))
        for bucket in in_flight:
            bucket.finish(wanted)


class _Bucket:
    """Gradients that are being summed over ranks; a missing one counts as zero."""

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self._parameters = parameters
        first = parameters[0].grad
        self._is_in_place = len(parameters) == 1 and first is not None and first.is_contiguous()
        if self._is_in_place and first is not None:
            self._flat = first.view(-1)
        else:
            self._flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        self._handle = world.start_all_reduce(self._flat)

    def finish(self, wanted: Container[nn.Parameter]) -> None:
        """Wait for the sums, and set the gradients of parameters that any rank has one of."""
        self._handle.wait()
        if self._is_in_place:
            return
        sums = torch.split_with_sizes(self._flat, [parameter.numel() for parameter in self._parameters])
        for parameter, total in zip(self._parameters, sums, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif parameter in wanted:
                parameter.grad = total.view_as(parameter).clone()  # a view would keep the whole bucket


def present_anywhere(gradients: Iterable[Tensor | None], world: World, device: torch.device) -> list[bool]:
    """Return for each gradient whether any rank has it. Collective."""
    present = [gradient is not None for gradient in gradients]
    counts = torch.tensor(present, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    world.all_reduce_sum(counts)
    # Reading the counts waits for the device, so only ranks that lack a gradient do.
    return present if all(present) else (counts > 0).tolist()


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


def _buckets(trained: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in order, the same on all ranks; those of a bucket have one dtype and device.

    Parameters are not split: one that exceeds a bucket's size has a bucket to itself.
    """
    bucket: list[nn.Parameter] = []
    held_bytes = 0
    for parameter in trained:
        kind, size = (parameter.dtype, parameter.device), parameter.nbytes
        if bucket and (held_bytes + size > GRADIENT_BUCKET_BYTES or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(parameter)
        held_bytes += size
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


# Models sharded by FSDP2 (`fully_shard`) or copied by its `replicate`.
#
# FSDP2 gathers weights before each layer if layers free them, which needs waves; else once, before the step's first
# micro-batch. In waves all ranks gather, hop and reduce in the same order, which the order check proves for recorded
# runs.


def fsdp_sync(model: nn.Module, world: World, sync: Sync, reduce: Reduce) -> GradientSync:
    """Return the gradient reducer of a model whose root is an FSDP2 module.

    Args:
        model: the trained model; all its trainable parameters are sharded.
        world: all ranks.
        sync: the plan's sync mode.
        reduce: when layers that free their weights reduce gradients; see `FsdpWaveSync`.
    """
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


class _FsdpSync(GradientSync):
    """Base of both reducers: multiplies the loss by the divisor of the gradients.

    FSDP2 divides by the number of ranks unless the script sets another divisor (torchtitan sets 1), so the divisor is
    read for each micro-batch.
    """

    lets_ranks_run_apart = False

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model: Any = model
        self._world = world
        self._groups = [
            (name, group)
            for name, group in _param_groups(model)
            if any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
        ]
        self.loss_factor = self._divisor()

    def summed(self) -> Iterator[nn.Parameter]:
        """Yield the parameters and their unsharded counterparts, which appear in the autograd graph."""
        yield from self._model.parameters()
        for _, group in self._groups:
            for held in group.fsdp_params:
                if hasattr(held, "_unsharded_param"):  # created by the first gather
                    yield held._unsharded_param

    def drop(self) -> None:
        drop_gradients(self._model)

    def before_microbatch(self, *, is_last: bool) -> None:
        self.loss_factor = self._divisor()

    def reduce(self) -> None:
        if self._divisor() != self.loss_factor:
            raise RunError(
                f"the divisor of FSDP2's gradients changed from {self.loss_factor:g} to {self._divisor():g} inside a "
                "step; call set_gradient_divide_factor before the step"
            )

    def _divisor(self) -> float:
        """Return the divisor of gradients; raise RunError if layers have different ones."""
        first = None
        for name, group in self._groups:
            divisor = _gradient_divisor(name, group, self._world)
            if first is not None and divisor != first[1]:
                raise RunError(
                    f"FSDP2 divides the gradients of {first[0]} by {first[1]:g} and those of {name} by {divisor:g}; "
                    "call set_gradient_divide_factor with one factor for all layers, or for none"
                )
            first = first or (name, divisor)
        return float(self._world.size) if first is None else first[1]


class FsdpWaveSync(_FsdpSync):
    """FSDP2 that gathers each layer's weights in every micro-batch: all ranks together, wave by wave.

    All ranks run the same number of waves. By default gradients are reduced inside the backward of every wave, so that
    each rank only holds its shard of them. With `reduce="step"` they are reduced inside the last one only, which sends
    less, but each rank holds whole gradients until then. HSDP replicas are reduced in the last wave in either case.
    """

    def __init__(self, model: nn.Module, world: World, reduce: Reduce = "wave") -> None:
        super().__init__(model, world)
        self._reduces_waves = reduce == "wave"

    def before_microbatch(self, *, is_last: bool) -> None:
        super().before_microbatch(is_last=is_last)
        self._model.set_requires_gradient_sync(is_last or self._reduces_waves)
        self._model.set_requires_all_reduce(is_last)
        self._model.set_is_last_backward(is_last or self._reduces_waves)

    def restore(self) -> None:
        self._model.set_requires_gradient_sync(True)
        self._model.set_requires_all_reduce(True)
        self._model.set_is_last_backward(True)


class FsdpStepSync(_FsdpSync):
    """FSDP2 that keeps its weights: they are gathered once a step, and gradients are reduced once, at its end.

    No collective runs in between, so ranks may run different numbers of micro-batches. Memory is like ZeRO-2, with
    whole gradients on every rank until the step ends. All layers are gathered before the first forward and none inside
    it, where a rank in a ring would deadlock with a rank whose own gather waits for it.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world)
        self._layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._is_gathered = False

    def before_microbatch(self, *, is_last: bool) -> None:
        super().before_microbatch(is_last=is_last)
        if self._is_gathered:
            return
        self._set(False)
        for layer in self._layers:
            layer.unshard()
        self._is_gathered = True

    def reduce(self) -> None:
        """Run FSDP2's final backward callback for all layers: reduce-scatter, and free the weights."""
        super().reduce()
        self._set(True)
        # Private, but the only way: through its public API FSDP2 reduces inside a backward, of which ranks run
        # different numbers.
        self._model._get_fsdp_state()._root_post_backward_final_callback()
        self._is_gathered = False

    def restore(self) -> None:
        self._set(True)
        if self._is_gathered:  # aborted step: reshard, since the optimizer holds the shards
            for layer in self._layers:
                layer.reshard()
            self._is_gathered = False

    def _set(self, ends: bool) -> None:
        self._model.set_requires_gradient_sync(ends)
        self._model.set_reshard_after_backward(ends)
        self._model.set_is_last_backward(ends)


def _param_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's parameter groups, which are gathered and reduced together, with the names of their layers."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is at most one
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield name or "the model", group


def _gradient_divisor(name: str, group: Any, world: World) -> float:
    """Return the gradient divisor of one parameter group."""
    if getattr(group, "_all_reduce_hook", None) is not None:
        raise RunError(
            f"FSDP2 gives the gradients of {name} to an all-reduce hook of the script; under a plan gradients are "
            "summed over all ranks: remove set_all_reduce_hook"
        )
    # Before torch 2.8 a factor is wrapped in an NCCL reduce op, from which it cannot be read.
    opaque = getattr(group, "reduce_scatter_reduce_op", None) is not None
    if opaque or not (hasattr(group, "gradient_divide_factor") or hasattr(group, "reduce_scatter_reduce_op")):
        raise RunError(
            f"this torch does not show the factor by which FSDP2 divides the gradients of {name}; keep FSDP2's default "
            "divisor, or install torch 2.8 or newer"
        )
    factor = getattr(group, "gradient_divide_factor", None)
    return float(world.size if factor is None else factor)


def _check_covers(model: nn.Module, world: World) -> None:
    """Raise RunError if a parameter's gradient would not be reduced over all ranks.

    A mesh of all ranks is not sufficient: with tensor parallelism, FSDP2 reduces over one of its dimensions only.
    """
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            raise RunError(
                f"the parameter {name} is not sharded by the model's FSDP2, so that its gradients would not be summed; "
                "drop ignored_params, or freeze it"
            )
        _require_all_ranks(f"the parameter {name} is", 1 if mesh is None else mesh.size(), world)
    for name, group in _param_groups(model):
        sizes = (getattr(group.mesh_info, f"{kind}_mesh_size", 1) for kind in ("shard", "replicate"))
        _require_all_ranks(f"the weights of {name} are", math.prod(sizes), world)


def _require_all_ranks(sharded: str, covered: int, world: World) -> None:
    if covered != world.size:
        raise RunError(
            f"{sharded} sharded by FSDP2 over {covered} of {world.size} ranks; give fully_shard a mesh of all ranks"
        )


def _layer_that_gathers_again(model: nn.Module) -> str | None:
    """Return the name of the first FSDP2 layer that frees its weights after forward, or None."""
    root: Any = model
    for name, group in _param_groups(model):
        # The root keeps its weights by default, but only records so at its first forward.
        undecided = name == "the model" and getattr(root._get_fsdp_state(), "_auto_reshard_after_forward", True)
        if group.post_forward_mesh_info is not None and not undecided:
            return name
    return None


# DeepSpeed engines, with ZeRO 0 to 3.
#
# An engine reduces gradients inside every backward, or inside the last of a batch, which it determines by counting to
# its configured number of micro-batches. Under a plan ranks have different numbers of micro-batches, and which is the
# last depends on the step. Reductions are therefore deferred to the end of the step (`coalesce_grad_reduction`), at
# any stage. Alternatively, if ZeRO 2 or 3 keeps gradients sharded, they run in every backward of waves, of which all
# ranks have the same number.
#
# As in any DeepSpeed loop, the script may call `engine.step()` after every micro-batch, and only the last call of a
# step has an effect.

_SUBSTITUTED = ("step", "set_gradient_accumulation_boundary")


def engine_sync(engine: Any, world: World, sync: Sync, reduce: Reduce) -> EngineSync:
    """Return the gradient reducer of a DeepSpeed engine.

    Args:
        engine: the engine of `deepspeed.initialize`.
        world: all ranks.
        sync: the plan's sync mode.
        reduce: when ZeRO 2 and 3 reduce gradients in waves: in every `wave`, or once a `step`.
    """
    _check_engine(engine, world)
    stage = int(engine.zero_optimization_stage())
    if stage == 3 and sync == "iteration":
        raise RunError(
            "the DeepSpeed engine has ZeRO stage 3 and gathers its weights again for every micro-batch, of which ranks "
            "run different numbers under sync iteration; set stage 2, or plan with 'fcp plan --sync microbatch'"
        )
    return EngineSync(engine, reduces_waves=stage >= 2 and sync == "microbatch" and reduce == "wave")


class EngineSync(GradientSync):
    """DeepSpeed engine whose gradients are reduced once a step, after all backwards, or in every wave."""

    lets_ranks_run_apart = False

    def __init__(self, engine: Any, *, reduces_waves: bool) -> None:
        self._engine = engine
        self._reduces_waves = reduces_waves
        self._held_back = ExitStack()
        self._has_begun = False
        self._reduced_at = -1  # the engine's step count at the last reduction
        self._asked_step: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.loss_factor = _divisor(engine)

    def summed(self) -> Iterator[nn.Parameter]:
        return self._engine.module.parameters()  # type: ignore[no-any-return]

    def begin(self) -> None:
        if self._engine.global_steps == self._reduced_at:
            raise RunError(
                "the DeepSpeed engine took no step with the gradients of the plan's step before, and cannot add to "
                "them; call engine.step() after every step of the plan"
            )

    def before_microbatch(self, *, is_last: bool) -> None:
        engine = self._engine
        self.loss_factor = _divisor(engine)
        if not self._has_begun:
            self._begin()
        # Call the class's method: `_begin` shadows it on the instance, so that the script cannot move the boundary.
        type(engine).set_gradient_accumulation_boundary(engine, self._reduces_waves and is_last)
        self._asked_step = None  # only a call after the last micro-batch counts

    def _begin(self) -> None:
        engine = self._engine
        self._has_begun = True
        engine.step = self._ask_for_step
        engine.set_gradient_accumulation_boundary = lambda is_boundary: None
        if not self._reduces_waves:
            self._held_back.enter_context(_without_reductions(engine))

    def _ask_for_step(self, *args: Any, **kwargs: Any) -> None:
        self._asked_step = (args, kwargs)

    def reduce(self) -> None:
        """Reduce the deferred gradients."""
        self._leave_engine()
        self._reduced_at = self._engine.global_steps
        self._held_back.close()
        # The boundary stays set: `engine.step()` checks it, in `finish` or in the script.
        self._engine.set_gradient_accumulation_boundary(True)

    def drop(self) -> None:
        raise RunError(
            "a DeepSpeed engine cannot skip a step whose loss is not finite; stop there (on_nan='stop'), or train in "
            "fp16, where the engine skips it by itself"
        )

    def finish(self) -> None:
        """Run the optimizer step that the loop requested after its last micro-batch."""
        if self._asked_step is not None:
            args, kwargs = self._asked_step
            self._asked_step = None
            self._engine.step(*args, **kwargs)

    def restore(self) -> None:
        with _without_flush(self._engine):  # abandoned step: reducing on exit could hang
            self._held_back.close()
        self._leave_engine()

    def _leave_engine(self) -> None:
        self._has_begun = False
        for name in _SUBSTITUTED:
            vars(self._engine).pop(name, None)


@contextmanager
def _without_reductions(engine: Any) -> Iterator[None]:
    """Keep gradients local to each rank within the block; reduce them on exit."""
    if hasattr(engine.optimizer, "_coalesce_grad_reduction"):
        with engine.coalesce_grad_reduction():
            yield
        return
    # Stage 0, and stage 1 in bf16 with fp32 gradients, have an older optimizer without `_coalesce_grad_reduction`.
    with engine.no_sync():
        yield
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()


@contextmanager
def _without_flush(engine: Any) -> Iterator[None]:
    """Disable an engine's reductions within the block."""
    names = [name for name in dir(type(engine)) if name.startswith("_flush_coalesced_reduction")]
    names.append("allreduce_gradients")
    # Instance attributes shadow the methods of the class until they are popped.
    vars(engine).update(dict.fromkeys(names, lambda *_: None))
    try:
        yield
    finally:
        for name in names:
            vars(engine).pop(name)


def _divisor(engine: Any) -> float:
    """Return the divisor of an engine's gradients: the number of ranks times its configured number of micro-batches."""
    ranks = engine.dp_world_size if engine.gradient_average else 1
    return float(ranks * engine.gradient_accumulation_steps())


def _check_engine(engine: Any, world: World) -> None:
    """Raise RunError if an engine does anything to gradients but reduce them over all ranks."""
    optimizer = engine.optimizer
    held = hasattr(optimizer, "_coalesce_grad_reduction") or type(optimizer).__name__ == "BF16_Optimizer"
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)
    for is_refused, feature in (
        (not hasattr(optimizer, "step"), "no optimizer; give deepspeed.initialize one"),
        (
            engine.zero_optimization_stage() and not held,
            "an optimizer that cannot hold gradients back until the step ends; install DeepSpeed 0.19.8 or newer",
        ),
        (not engine.enable_backward_allreduce, "an optimizer that sends gradients itself (1-bit); use another"),
        (engine.dp_world_size != world.size, f"{engine.dp_world_size} of {world.size} ranks to reduce over; use all"),
        (engine.has_moe_layers, "experts of DeepSpeed, whose gradients are reduced over fewer ranks"),
        (bool(getattr(engine, "zenflow", False)), "ZenFlow, which reduces gradients at other times; remove it"),
        (not managed(), "managed_gradient_accumulation off; leave it on: the plan says which micro-batch is the last"),
        (type(optimizer).__name__.startswith("MiCS"), "MiCS, which is not tested; use ZeRO stage 3"),
    ):
        if is_refused:
            raise RunError(f"the DeepSpeed engine has {feature}")


# Forward-only steps, e.g. for log-probabilities and reference models: no gradients and no reduction.


class ForwardSync(GradientSync):
    """Disables gradients from a step's first micro-batch to its end.

    Args:
        gathers: reducer that gathers the weights of a sharded model for a step, or None if that is not needed.
        replica: model in DistributedDataParallel, or None. Its forwards must not broadcast buffers, since ranks run
            different numbers of forwards.
    """

    trains = False

    def __init__(self, gathers: GradientSync | None = None, replica: DistributedDataParallel | None = None) -> None:
        self._gathers, self._replica = gathers, replica
        self.lets_ranks_run_apart = gathers is None
        self._had_gradients = True

    def begin(self) -> None:
        self._had_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def before_microbatch(self, *, is_last: bool) -> None:
        torch.set_grad_enabled(False)  # the loop may have enabled it in between
        if self._gathers is not None:
            self._gathers.before_microbatch(is_last=is_last)
        if self._replica is not None:
            self._replica.require_forward_param_sync = False

    def restore(self) -> None:
        torch.set_grad_enabled(self._had_gradients)
        if self._gathers is not None:
            self._gathers.restore()
        if self._replica is not None:
            self._replica.require_forward_param_sync = True


def forward_sync(model: nn.Module | GradientSync | None, world: World, sync: Sync) -> ForwardSync:
    """Return the reducer of a model for forward-only steps."""
    if model is None or isinstance(model, GradientSync):
        return ForwardSync()
    part = reducing_module(model)
    if isinstance(part, DistributedDataParallel):
        return ForwardSync(replica=part)
    if isinstance(part, FSDPModule):
        return ForwardSync(gathers=fsdp_sync(part, world, sync, "wave"))
    if is_deepspeed_engine(part):
        engine_sync(part, world, sync, "wave")  # raises for ZeRO 3 under sync iteration
    return ForwardSync()


def without_backward(loss: Tensor, place: str) -> Tensor:
    """Return a loss (0-d) whose backward raises RunError, since the plan has no training."""
    with torch.enable_grad():
        refused = loss.detach().requires_grad_()
        refused.register_hook(lambda _: _refuse(place))  # type: ignore[no-untyped-call]
    return refused


def _refuse(place: str) -> None:
    raise RunError(f"{place}: {NO_TRAINING}")
