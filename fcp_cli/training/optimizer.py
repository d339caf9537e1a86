"""AdamW, its parameter groups, the learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.training.settings import TrainSettings

_BETAS = (0.9, 0.95)
_FUSED_ON = ("cpu", "cuda")


def make_optimizer(trained: Sequence[nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """Make an AdamW that decays matrices; norms and biases are not pulled towards zero."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=_BETAS,
        # One kernel updates in place. Other ways make temporary copies of all weights, or of one after the other.
        fused=True if trained[0].device.type in _FUSED_ON else None,
        foreach=None if trained[0].device.type in _FUSED_ON else False,
    )


def learning_rate_at(step: int, *, settings: TrainSettings, plan_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then a cosine down to the floor.

    It is a function of the step alone, so that resuming is exact.

    Args:
        step: optimizer step, from 0; step `warmup_steps` is the first at the peak.
        settings: peak, warm-up, decay and floor.
        plan_steps: where the cosine ends unless the settings name another step.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    end = settings.decay_steps or plan_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(
    trained: Sequence[nn.Parameter], max_norm: float, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale gradients so that their global L2 norm is at most `max_norm` (0: leave them); return the norm before [].

    Args:
        trained: what the optimizer updates on this rank; of FSDP2's shards the norm is over all of them.
        max_norm: that gradients are clipped to.
        group: ranks whose optimizers update other rows than this one's.
    """
    norm = nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if group is not None:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    # An infinite limit scales by 1.
    nn.utils.clip_grads_with_norm_(trained, max_norm if max_norm > 0 else math.inf, norm)
    return norm
