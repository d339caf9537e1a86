"""Recomputation as needed: each rank recomputes as many layers as the tokens of its micro-batch demand.

The level of a layer is chosen at each call, by the tokens of its input, and kept with the call: a micro-batch is
recomputed as it ran, regardless of what ran after it. No level runs attention again, so that ranks of a ring may differ
in it, and messages are those without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.cost.recompute_levels import RecomputeLevel, layers_by_level, whole_layers
from fcp_cli.recipe import LayerRecompute
from fcp_cli.runtime.recomputation.recompute import recomputed, staged_attention


class LayerLevels:
    """Levels of a model's layers.

        levels = LayerLevels(session.recompute_levels, layers=len(blocks))
        for index, block in enumerate(blocks):
            hidden = levels.run(index, block, hidden, position_ids)

    A block of which only the activation function is recomputed asks `LayerLevels.recomputes_activation`.

    Args:
        levels: the levels of the plan.
        layers: the layers of the model.
        tokens_per_row: the tokens of the rank per row of a layer's input; more than 1 if devices share them.
        share: the share of layers that recompute in every micro-batch, on a pipeline's stage; None: by its tokens.
    """

    def __init__(
        self,
        levels: Sequence[RecomputeLevel],
        *,
        layers: int,
        tokens_per_row: int = 1,
        share: float | None = None,
    ) -> None:
        self._share = share
        self._levels = tuple(levels)
        self._layers = layers
        self._tokens_per_row = tokens_per_row

    def level(self, index: int, tokens: int) -> LayerRecompute:
        """Return the level of a layer in a micro-batch of so many tokens on this rank."""
        if self._share is None:
            number, count = layers_by_level(self._levels, tokens, self._layers)
        else:
            number, count = len(self._levels) - 1, whole_layers(self._share, self._layers)
        return self._levels[number if index < count else number - 1].recompute

    def run(self, index: int, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a layer at its level.

        Args:
            index: the index of the layer in the model, from 0.
            layer: called with `hidden`, `args` and `kwargs`.
            hidden: [..., T, width] of T rows of tokens, with any other dimensions of size 1.
        """
        level = self.level(index, hidden.shape[:-1].numel() * self._tokens_per_row)
        if level in ("none", "activation"):
            token = _recomputes_activation.set(level == "activation")
            try:
                return layer(hidden, *args, **kwargs)
            finally:
                _recomputes_activation.reset(token)
        keeps = {"keeps_attention": level == "selective", "keeps_products": level == "elementwise"}
        return recomputed(layer, hidden, *args, **keeps, **kwargs)

    @staticmethod
    def attend(compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of an attention that is not fcp's, kept if its layer keeps attention."""
        return staged_attention(compute)

    @staticmethod
    def recompute_activation(mlp: nn.Module, *, always: bool = False) -> None:
        """Let an MLP in training keep only its input and the outputs of its matrix products.

        Args:
            mlp: the module whose forward is replaced.
            always: False: only in layers whose level says so.
        """
        mlp.forward = partial(_run_mlp, mlp, mlp.forward, always)

    @staticmethod
    def recomputes_activation() -> bool:
        """Return whether the layer that runs now recomputes only its activation function."""
        return _recomputes_activation.get()


def _run_mlp(mlp: nn.Module, forward: Callable[..., Any], always: bool, *args: Any, **kwargs: Any) -> Any:
    if not (mlp.training and torch.is_grad_enabled() and (always or LayerLevels.recomputes_activation())):
        return forward(*args, **kwargs)
    return recomputed(forward, *args, keeps_products=True, **kwargs)


_recomputes_activation: ContextVar[bool] = ContextVar("recomputes_activation", default=False)
