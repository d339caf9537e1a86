"""Interface of gradient reducers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class GradientSync:
    """A way to sum the gradients of one kind of model over all ranks. This one leaves the sum to the script.

    `Session.steps(GradientSync())` says so: without it, and without a model, a job of several ranks is stopped.
    """

    loss_factor = 1.0
    """Factor on the loss that makes reduced gradients sums over ranks; up to date after `before_microbatch`."""

    trains = True
    """Whether micro-batches have a backward; False under a plan of forward passes."""

    lets_ranks_run_apart = True
    """Whether a rank may run other modules, and separate backwards, while others run the whole model."""

    def summed(self) -> Iterator[nn.Parameter] | None:
        """Return the parameters whose gradients are summed, sharded and whole; None: whichever the script sums."""
        return None

    def begin(self) -> None:
        """Prepare for a step; called before the first micro-batch, when gradients of steps before may be there."""

    def drop(self) -> None:
        """Let go of all gradients, so that an optimizer changes nothing; called after `reduce`."""

    def before_microbatch(self, *, is_last: bool) -> None:
        """Prepare the model for one micro-batch; called before the forward of each."""

    def reduce(self) -> None:
        """Make gradients sums over all ranks; called after the backward of the step's last micro-batch."""

    def finish(self) -> None:
        """Act on gradients that are final; called after `reduce`, and after `drop` if that was called."""

    def restore(self) -> None:
        """Leave the model as it was found; called when the step is over, finished or given up."""


def drop_gradients(model: nn.Module) -> None:
    """Let go of the gradients of all parameters of a model."""
    for parameter in model.parameters():
        parameter.grad = None
