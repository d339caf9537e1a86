"""Draws random initial weights without ever holding the full model.

Modules are drawn one after another on the host, as transformers initializes them, and each rank keeps its rows. The
generator runs through all modules on every rank, so that weights depend only on the seed, not on ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.training.weights.weights import local_rows

_Fill = Callable[[nn.Module], None]


def draw_weights(model: Any, seed: int) -> None:
    """Fill a transformers model, plain or sharded by rows, with random weights.

    Weights without an initialization rule keep their value from construction.

    Args:
        model: model on any device but `meta`.
        seed: seed for torch's generator.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        _draw(model, model._init_weights, set())


def _draw(module: nn.Module, fill: _Fill, drawn: set[int]) -> None:
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        if name.startswith("lora_"):  # adapters are already initialized
            continue
        # Nested models, such as vision encoders, have their own rules.
        _draw(child, child._init_weights if isinstance(child, PreTrainedModel) else fill, drawn)
    own = {
        name: tensor for name, tensor in module._parameters.items() if tensor is not None and id(tensor) not in drawn
    }
    if own:
        drawn.update(map(id, own.values()))  # tied weights are drawn once
        _draw_own(module, own, fill)


def _draw_own(module: nn.Module, own: dict[str, nn.Parameter], fill: _Fill) -> None:
    """Draw a module's full weights, and keep this rank's rows."""
    whole = {name: nn.Parameter(torch.full(held.shape, torch.nan)) for name, held in own.items()}
    module._parameters.update(whole)
    try:
        fill(module)
    finally:
        module._parameters.update(own)
    for name, held in own.items():
        local, rows = local_rows(held)
        if local.numel() and _is_drawn(whole[name]):
            local.copy_(whole[name][rows.start : rows.stop] if held.dim() else whole[name])


def _is_drawn(tensor: Tensor) -> bool:
    """Return whether a rule wrote to a NaN tensor; transformers 4 writes to `.data`, which has no version counter."""
    return tensor._version > 0 or not bool(tensor.flatten()[0].isnan())
