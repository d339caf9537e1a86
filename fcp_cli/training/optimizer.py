"""AdamW, its parameter groups, the learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.training.settings import TrainSettings

_BETAS = (0.9, 0.95)
_FUSED_ON = ("cpu", "cuda")


def make_optimizer(trained: Sequence[nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """Create an AdamW with weight decay only for matrices, not for norms and biases."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=_BETAS,
        # The fused kernel updates in place; other variants make temporary copies of all weights, or of one at a time.
        fused=True if trained[0].device.type in _FUSED_ON else None,
        foreach=None if trained[0].device.type in _FUSED_ON else False,
    )


def learning_rate_at(step: int, *, settings: TrainSettings, plan_steps: int) -> float:
    """Return the learning rate of a step, with transformers' schedule of that name.

    It depends only on the step, so that resuming is exact. As in transformers, warm-up starts at 0.

    Args:
        step: optimizer step, from 0; step `warmup_steps` is the first one at the peak.
        settings: provides schedule, peak, warm-up, decay and minimum.
        plan_steps: end of the schedule unless the settings name another; the rate is constant afterwards.
    """
    end = settings.decay_steps or plan_steps
    return settings.learning_rate * _schedule(settings, end)(min(step, end))


@cache
def _schedule(settings: TrainSettings, end: int) -> Callable[[int], float]:
    """Return a function from step to share of the peak rate, up to `end`."""
    from transformers import get_scheduler

    warmup = math.ceil(settings.warmup_steps * (end if settings.warmup_steps < 1 else 1))
    floor = settings.min_learning_rate_ratio
    name: str = settings.lr_schedule
    arguments: dict[str, Any] = {}
    if name == "constant" or floor == 1 or warmup >= end:
        name = "constant_with_warmup"
    elif name == "cosine":
        name, arguments = "cosine_with_min_lr", {"min_lr_rate": floor}
    elif name == "wsd":
        decay = min(math.ceil(settings.wsd_decay_ratio * end), end - warmup)
        name, arguments = "warmup_stable_decay", {"min_lr_ratio": floor, "num_decay_steps": decay}
    elif floor:  # `linear` ends at 0
        name, arguments = "polynomial", {"lr_end": floor, "power": 1.0}
    # transformers exposes these functions of the step only around an optimizer.
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(name, unused, warmup, end, scheduler_specific_kwargs=arguments)
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    return share


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(
    trained: Sequence[nn.Parameter], max_norm: float, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Clip gradients to a global L2 norm of `max_norm` (0: no clipping); return the norm before clipping, [].

    Args:
        trained: parameters updated on this rank; the norm covers all FSDP2 shards.
        max_norm: maximum norm.
        group: ranks whose optimizers update other rows, or None.
    """
    norm = nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if group is not None:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    # An infinite limit does not scale.
    nn.utils.clip_grads_with_norm_(trained, max_norm if max_norm > 0 else math.inf, norm)
    return norm
