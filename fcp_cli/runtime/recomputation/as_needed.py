"""Recomputation as needed: each rank recomputes as many layers as its micro-batch's tokens require.

A layer's level is chosen at each call, by the number of input tokens, and kept with the call, so a micro-batch is
recomputed as it ran, regardless of later micro-batches. No level reruns attention, so ranks of a ring may use different
levels, and messages are the same as without recomputation.
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
from fcp_cli.runtime.recomputation.recompute import recomputed, staged_call


class LayerLevels:
    """Recompute levels of a model's layers.

        levels = LayerLevels(session.recompute_levels, layers=len(blocks))
        for index, block in enumerate(blocks):
            hidden = levels.run(index, block, hidden, position_ids)

    A block that can recompute only its activation function checks `LayerLevels.recomputes_activation`.

    Args:
        levels: recompute levels of the plan.
        layers: number of layers of the model.
        tokens_per_row: tokens of the rank per row of a layer's input; above 1 if devices share them.
        share: fraction of layers to recompute in every micro-batch, on a pipeline stage; None: by its tokens.
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
        """Return the level of a layer in a micro-batch of `tokens` tokens on this rank."""
        if self._share is None:
            number, count = layers_by_level(self._levels, tokens, self._layers)
        else:
            number, count = len(self._levels) - 1, whole_layers(self._share, self._layers)
        return self._levels[number if index < count else number - 1].recompute

    def run(self, index: int, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a layer at its level.

        Args:
            index: index of the layer in the model, from 0.
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
        return staged_call(compute)

    @staticmethod
    def recompute_activation(mlp: nn.Module, *, always: bool = False) -> None:
        """Make an MLP save only its input and the outputs of its matrix products during training.

        Args:
            mlp: module whose forward is replaced.
            always: whether to do so at every level; else only in layers at level `activation`.
        """
        mlp.forward = partial(_run_mlp, mlp, mlp.forward, always)

    @staticmethod
    def recomputes_activation() -> bool:
        """Return whether the current layer recomputes only its activation function."""
        return _recomputes_activation.get()


def _run_mlp(mlp: nn.Module, forward: Callable[..., Any], always: bool, *args: Any, **kwargs: Any) -> Any:
    if not (mlp.training and torch.is_grad_enabled() and (always or LayerLevels.recomputes_activation())):
        return forward(*args, **kwargs)
    return recomputed(forward, *args, keeps_products=True, **kwargs)


_recomputes_activation: ContextVar[bool] = ContextVar("recomputes_activation", default=False)
