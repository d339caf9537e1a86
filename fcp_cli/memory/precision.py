"""Bytes of each type of number that a recipe keeps."""

from __future__ import annotations

from dataclasses import dataclass

from fcp_cli.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes of one number.

    Attributes:
        weight: bytes of a weight that every rank holds whole between steps.
        master: bytes of its copy in the optimizer, 0 where the weights themselves are updated.
        moments: bytes of Adam's two moments together.
        gathered: bytes of a weight that ranks share out and that is gathered to compute with it.
        gradient: bytes of a gradient that is kept.
        activation: the activation of the outputs of matrices and attention.
        residual: bytes of the residual stream, which autocast leaves in the type of the weights.
        loss: bytes of the logits in the loss.
        copy: bytes of the copy of a matrix that autocast makes and autograd keeps; 0 without autocast.
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
    """Return the bytes of the numbers that a recipe computes with."""
    return _PRECISIONS[recipe.precision]
