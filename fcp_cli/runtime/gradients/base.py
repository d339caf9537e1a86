"""Interface of gradient reducers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class GradientSync:
    """Gradient reducer of one kind of model; this base class leaves the reduction to the script.

    Pass it as `Session.steps(GradientSync())`. With neither it nor a model, a job of several ranks raises.
    """

    loss_factor = 1.0
    """Factor on the loss that turns averaged gradients into sums over ranks; valid after `before_microbatch`."""

    trains = True
    """Whether micro-batches have a backward; False under a plan of forward passes."""

    lets_ranks_run_apart = True
    """Whether a rank may run other modules and separate backwards while others run the whole model."""

    def summed(self) -> Iterator[nn.Parameter] | None:
        """Return the parameters with reduced gradients, sharded and unsharded, or None if the script reduces them."""
        return None

    def begin(self) -> None:
        """Prepare for a step. Called before its first micro-batch; gradients of earlier steps may still be present."""

    def drop(self) -> None:
        """Drop all gradients, so that an optimizer changes nothing. Called after `reduce`."""

    def before_microbatch(self, *, is_last: bool) -> None:
        """Prepare the model for one micro-batch. Called before each forward."""

    def reduce(self) -> None:
        """Turn gradients into sums over all ranks. Called after the backward of the step's last micro-batch."""

    def finish(self) -> None:
        """Act on the final gradients. Called after `reduce`, and after `drop` if the step is skipped."""

    def restore(self) -> None:
        """Restore the model's original state. Called when the step ends, finished or abandoned."""


def drop_gradients(model: nn.Module) -> None:
    """Drop the gradients of all parameters of a model."""
    for parameter in model.parameters():
        parameter.grad = None
