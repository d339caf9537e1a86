"""AdamW, its parameter groups, the learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fcp_cli.training.settings import TrainSettings

_BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Make an AdamW that decays matrices; norms and biases are not pulled towards zero."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.learning_rate, betas=_BETAS)


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


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their global L2 norm is at most `max_norm` (0: leave them); return the norm before.

    Under FSDP each rank holds a shard of every gradient; the norm is over all of them.
    """
    # An infinite limit measures the norm and scales by 1.
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else math.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
