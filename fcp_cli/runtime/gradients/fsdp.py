"""Models that FSDP2 (`fully_shard`) shards over all ranks, and those that its `replicate` copies.

FSDP2 gathers weights: before each layer if it frees them, which needs waves, else once, before the step's first
micro-batch. In waves all ranks gather, hop and reduce in one order, which the order check proves of recorded runs.
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
    """Return the way to sum the gradients of a model whose root is an FSDP2 module.

    Args:
        model: the model that is trained; all that it trains is sharded.
        world: all ranks.
        sync: the sync of the plan.
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
    """Base of both reducers: the loss is multiplied by the divisor of the gradients.

    FSDP2 divides by the number of ranks, unless the script sets a divisor, as torchtitan does: it divides by 1. So the
    divisor is read anew for each micro-batch.
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
        """Yield the parameters, and their unsharded counterparts in a forward, which autograd knows."""
        yield from self._model.parameters()
        for _, group in self._groups:
            for held in group.fsdp_params:
                if hasattr(held, "_unsharded_param"):  # made when it is first gathered
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
        """Return the divisor of gradients, which is the same number for all layers, or raise RunError."""
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
    """FSDP2 (`fully_shard`) that gathers each layer's weights again: all ranks together, micro-batch by micro-batch.

    Gradients are reduced inside the backward of every wave, which all ranks run equally many of, so that each rank
    holds only its share of them; or only inside the last one, which sends less, but until then each rank holds them
    whole. Copies of the shards (HSDP) are summed in the last one in either case.
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

    Between the two no collective runs, so ranks may run different numbers of micro-batches: ZeRO-2, whose gradients
    are whole on every rank until the step ends. All layers are gathered before the first forward and none inside it:
    a rank in a ring would wait there for a rank whose own gather waits for it.
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
        """Finish as FSDP2's last backward does, for all layers: reduce-scatter, and free the weights."""
        super().reduce()
        self._set(True)
        # Private, but the only way: by its public ones FSDP2 reduces inside a backward, of which ranks run different
        # numbers.
        self._model._get_fsdp_state()._root_post_backward_final_callback()
        self._is_gathered = False

    def restore(self) -> None:
        self._set(True)
        if self._is_gathered:  # the step was aborted: the optimizer holds the shards
            for layer in self._layers:
                layer.reshard()
            self._is_gathered = False

    def _set(self, ends: bool) -> None:
        self._model.set_requires_gradient_sync(ends)
        self._model.set_reshard_after_backward(ends)
        self._model.set_is_last_backward(ends)


def _param_groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the groups of parameters that FSDP2 gathers and reduces together, with the names of their layers."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one, or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield name or "the model", group


def _gradient_divisor(name: str, group: Any, world: World) -> float:
    """Return one group's divisor of gradients."""
    if getattr(group, "_all_reduce_hook", None) is not None:
        raise RunError(
            f"FSDP2 gives the gradients of {name} to an all-reduce hook of the script; under a plan gradients are "
            "summed over all ranks: remove set_all_reduce_hook"
        )
    # Before torch 2.8 a factor becomes an operation of NCCL, of which the number cannot be read.
    opaque = getattr(group, "reduce_scatter_reduce_op", None) is not None
    if opaque or not (hasattr(group, "gradient_divide_factor") or hasattr(group, "reduce_scatter_reduce_op")):
        raise RunError(
            f"this torch does not show the factor by which FSDP2 divides the gradients of {name}; keep FSDP2's default "
            "divisor, or install torch 2.8 or newer"
        )
    factor = getattr(group, "gradient_divide_factor", None)
    return float(world.size if factor is None else factor)


def _check_covers(model: nn.Module, world: World) -> None:
    """Raise RunError if the gradients of a parameter would miss those of some ranks.

    It is not enough that its mesh has all ranks: with tensor parallelism, FSDP2 sums over one dimension of it.
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
    """Return the first FSDP2 layer that lets go of its weights after its forward, to gather them again."""
    root: Any = model
    for name, group in _param_groups(model):
        # The root keeps its weights by default, but records so only at its first forward.
        undecided = name == "the model" and getattr(root._get_fsdp_state(), "_auto_reshard_after_forward", True)
        if group.post_forward_mesh_info is not None and not undecided:
            return name
    return None
