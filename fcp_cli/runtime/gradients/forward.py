"""Forward-only steps, e.g. for log-probabilities and reference models: no gradients and no reduction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.runtime.agreement.plan_agreement import NO_TRAINING
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync
from fcp_cli.runtime.gradients.engine import engine_sync
from fcp_cli.runtime.gradients.fsdp import fsdp_sync
from fcp_cli.runtime.gradients.wrapping import is_deepspeed_engine, reducing_module


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
