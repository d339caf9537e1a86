"""The end of a step: gradients summed over the ranks, clipped, and AdamW on a rank's share of the parameters."""

from __future__ import annotations

import torch
from torch import nn

from fcp_cli.profiling.workers.workload import Workload
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients import PlainSync


class UpdateStep:
    """Runs the end of a step, to time it: sums, clips and applies the gradients that a workload has left.

    Gradients are summed by an all-reduce, also for a job that reduce-scatters gradients and gathers weights: the
    bytes are as many.

    Args:
        workload: the workload that has run at least one micro-batch.
        world: all ranks.
        share: the share of the parameters that the optimizer updates here; the others are updated by other ranks of
            the job.
    """

    def __init__(self, workload: Workload, world: World, *, share: float) -> None:
        holders = nn.ParameterList(workload.gradient_holders())
        self._sync = PlainSync(holders, world)
        self._holders = list(holders)
        # Weights stay the same over all repeats: the rate is 0.
        self.optimizer = torch.optim.AdamW(_share_of(self._holders, share), lr=0.0)

    def run(self) -> None:
        """Sum, clip and update once."""
        self._sync.reduce()
        nn.utils.clip_grad_norm_(self._holders, 1.0)
        self.optimizer.step()


def _share_of(parameters: list[nn.Parameter], share: float) -> list[nn.Parameter]:
    """Return the first parameters that together have at least this share of all elements; never none."""
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
    """Return the bytes of weights, gradients and optimizer state, counted tensor by tensor."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = 0 if parameter.grad is None else parameter.grad.nbytes
            state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
            total += parameter.nbytes + gradient + sum(value.nbytes for value in state)
    return total
