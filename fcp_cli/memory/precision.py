"""Element sizes of the tensors of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from fcp_cli.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes per element.

    Attributes:
        weight: unsharded weights between steps.
        master: master weights of the optimizer; 0 if it updates the weights in place.
        moments: both moments of Adam together.
        gathered: sharded weights while they are gathered for compute.
        gradient: accumulated gradients.
        activation: outputs of matrix products and attention.
        residual: residual stream, which autocast leaves in the type of the weights.
        loss: logits in the loss.
        copy: weight copies that autocast makes and autograd keeps; 0 without autocast.
    """

    weight: int
    master: int
    moments: int
    gathered: int
    gradient: int
    activation: int
    residual: int
    loss: int = 4
    copy: int = 0


_PRECISIONS = {
    "bf16": Precision(weight=2, master=4, moments=8, gathered=2, gradient=4, activation=2, residual=2),
    "amp": Precision(weight=4, master=0, moments=8, gathered=4, gradient=4, activation=2, residual=4, copy=2),
    "fp32": Precision(weight=4, master=0, moments=8, gathered=4, gradient=4, activation=4, residual=4),
    "fp64": Precision(weight=8, master=0, moments=16, gathered=8, gradient=8, activation=8, residual=8, loss=8),
}


def precision_of(recipe: Recipe) -> Precision:
    """Return the element sizes of a recipe."""
    return _PRECISIONS[recipe.precision]
