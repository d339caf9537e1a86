"""Select the gradient reducer of a model."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.recipe import Phase, Reduce
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync
from fcp_cli.runtime.gradients.engine import engine_sync
from fcp_cli.runtime.gradients.forward import forward_sync
from fcp_cli.runtime.gradients.fsdp import fsdp_sync
from fcp_cli.runtime.gradients.replicas import DdpSync, PlainSync
from fcp_cli.runtime.gradients.wrapping import is_deepspeed_engine, reducing_module


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
        reduce: when a reducer that shards gradients reduces them; see `fsdp.FsdpWaveSync`.
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
