"""Counts operations that the host launches per micro-batch: a fixed cost, independent of tokens.

Counted from transformers' layers under bf16 autocast, without operations that only create views; a test recounts them.
Layers with a state and vision encoder blocks count as Llama layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fcp_cli.memory.trained import backward_of
from fcp_cli.models.figures import LayerKind
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe, Recompute


class _Operations(NamedTuple):
    forward: float
    backward: float


_LAYER: Final = _Operations(48, 87)
_HEAD_NORMS: Final = _Operations(16, 30)
_EXPERTS: Final = _Operations(14, 13)
_TWO_MORE_NORMS: Final = _Operations(22, 34)


# Forward passes added by recomputation. If products are saved, both passes go through Python, which takes as long
# again.
_AGAIN: Final[Mapping[Recompute, float]] = {
    "none": 0.0,
    "activation": 0.25,
    "elementwise": 3.0,
    "selective": 1.0,
    "full": 1.0,
}


def host_operations(spec: ModelSpec, recipe: Recipe) -> float:
    """Return the operations of a forward and backward pass of all layers, including recomputation."""
    backward = backward_of(spec, recipe)
    found = 0.0
    for kind, count in spec.kinds.items():
        layer = layer_operations(spec, kind)
        again = layer.forward * _AGAIN[recipe.recompute]
        found += count * (layer.forward + backward.layers * (layer.backward + again))
    if spec.vision is not None:
        again = _LAYER.forward if recipe.recomputes_layers else 0
        found += spec.vision.depth * (_LAYER.forward + backward.vision.inputs * (_LAYER.backward + again))
    return found


def layer_operations(spec: ModelSpec, kind: LayerKind) -> _Operations:
    """Return the forward and backward operations of a layer."""
    parts = [_LAYER]
    if spec.qk_norm and kind.attends:
        parts.append(_HEAD_NORMS)
    if spec.experts is not None and kind.has_experts:
        parts.append(_EXPERTS)
    if spec.has("four norms"):
        parts.append(_TWO_MORE_NORMS)
    share = ((kind.attention != "none") + (kind.mlp != "none")) / 2  # half a layer: a norm and the operations after it
    return _Operations(share * sum(part.forward for part in parts), share * sum(part.backward for part in parts))
