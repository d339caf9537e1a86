"""Gradient reduction of models sharded by FSDP2 (`fully_shard`) or copied by its `replicate`.

FSDP2 gathers weights before each layer if layers free them, which needs waves; else once, before the step's first
micro-batch. In waves all ranks gather, hop and reduce in the same order, which the order check proves for recorded
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.recipe import Reduce
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync, drop_gradients


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
