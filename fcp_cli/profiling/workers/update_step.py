"""The end of a step: gradient reduction, clipping, and AdamW on a rank's share of parameters."""

from __future__ import annotations

import torch
from torch import nn

from fcp_cli.profiling.workers.workload import Workload
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients import PlainSync


class UpdateStep:
    """Runs the end of a step for timing: reduces, clips and applies a workload's gradients.

    Always uses an all-reduce: reduce-scatter of gradients plus all-gather of weights transfers the same bytes.

    Args:
        workload: workload that has run at least one micro-batch.
        world: all ranks.
        share: share of parameters updated here; other ranks of the job update the rest.
    """

    def __init__(self, workload: Workload, world: World, *, share: float) -> None:
        holders = nn.ParameterList(workload.gradient_holders())
        self._sync = PlainSync(holders, world)
        self._holders = list(holders)
        # Learning rate 0 keeps weights constant over repeats.
        self.optimizer = torch.optim.AdamW(_share_of(self._holders, share), lr=0.0)

    def run(self) -> None:
        """Reduce, clip and update once."""
        self._sync.reduce()
        nn.utils.clip_grad_norm_(self._holders, 1.0)
        self.optimizer.step()


def _share_of(parameters: list[nn.Parameter], share: float) -> list[nn.Parameter]:
    """Return the smallest parameters that together reach this share of all elements; at least one."""
    wanted = share * sum(parameter.numel() for parameter in parameters)
    chosen: list[nn.Parameter] = []
    held = 0
    for parameter in sorted(parameters, key=nn.Parameter.numel):
        if chosen and held >= wanted:
            break
        chosen.append(parameter)
        held += parameter.numel()
    return chosen


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the total bytes of weights, gradients and optimizer state."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = 0 if parameter.grad is None else parameter.grad.nbytes
            state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
            total += parameter.nbytes + gradient + sum(value.nbytes for value in state)
    return total
