"""Draws the random weights of a model without a checkpoint, and never holds the whole model.

A module after the other is drawn whole on the host, as transformers fills it, and each rank keeps the rows that it
holds. The generator runs through all modules on every rank, so that the numbers depend only on the seed: neither on
the number of ranks nor on the sharding.
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

    Weights without a rule in transformers keep their value from construction.

    Args:
        model: the model on any device but `meta`.
        seed: the seed that torch's generator is set to first.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        _draw(model, model._init_weights, set())


def _draw(module: nn.Module, fill: _Fill, drawn: set[int]) -> None:
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        if name.startswith("lora_"):  # adapters come drawn
            continue
        # A nested model, such as a vision encoder, has its own rules.
        _draw(child, child._init_weights if isinstance(child, PreTrainedModel) else fill, drawn)
    own = {
        name: tensor for name, tensor in module._parameters.items() if tensor is not None and id(tensor) not in drawn
    }
    if own:
        drawn.update(map(id, own.values()))  # a tied weight is drawn at its first place
        _draw_own(module, own, fill)


def _draw_own(module: nn.Module, own: dict[str, nn.Parameter], fill: _Fill) -> None:
    """Draw a module's weights whole, and keep the rows of this rank's shard."""
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
    """Return whether a rule wrote to a tensor of NaN; transformers 4 writes to `.data`, which counts no version."""
    return tensor._version > 0 or not bool(tensor.flatten()[0].isnan())
