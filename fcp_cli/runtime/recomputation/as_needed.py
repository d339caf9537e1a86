"""Recomputation as needed: each rank recomputes as many layers as the tokens of its micro-batch demand.

The level of a layer is chosen at each call, by the tokens of its input, and kept with the call: a micro-batch is
recomputed as it ran, whatever ran after it. No level runs attention again, so that ranks of a ring may differ in it,
and messages are those without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fcp_cli.cost.recompute_levels import RecomputeLevel, layers_by_level
from fcp_cli.recipe import LayerRecompute
from fcp_cli.runtime.recomputation.recompute import recomputed


class LayerLevels:
    """Levels of a model's layers.

        levels = LayerLevels(session.recompute_levels, layers=len(blocks))
        for index, block in enumerate(blocks):
            hidden = levels.run(index, block, hidden, position_ids)

    A block whose activation function is recomputed alone asks `LayerLevels.recomputes_activation`.
    """

    def __init__(self, levels: Sequence[RecomputeLevel], *, layers: int) -> None:
        self._levels = tuple(levels)
        self._layers = layers

    def level(self, index: int, tokens: int) -> LayerRecompute:
        """Return the level of a layer in a micro-batch of so many tokens on this rank."""
        number, count = layers_by_level(self._levels, tokens, self._layers)
        return self._levels[number if index < count else number - 1].recompute

    def run(self, index: int, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a layer at its level.

        Args:
            index: the index of the layer in the model, from 0.
            layer: called with `hidden`, `args` and `kwargs`.
            hidden: [..., T, width] of T tokens, with any leading dimensions of size 1.
        """
        level = self.level(index, hidden.shape[:-1].numel())
        if level in ("none", "activation"):
            token = _recomputes_activation.set(level == "activation")
            try:
                return layer(hidden, *args, **kwargs)
            finally:
                _recomputes_activation.reset(token)
        keeps = {"keeps_attention": level == "selective", "keeps_products": level == "elementwise"}
        return recomputed(layer, hidden, *args, **keeps, **kwargs)

    @staticmethod
    def recomputes_activation() -> bool:
        """Return whether the layer that runs now recomputes its activation function alone."""
        return _recomputes_activation.get()


_recomputes_activation: ContextVar[bool] = ContextVar("recomputes_activation", default=False)
