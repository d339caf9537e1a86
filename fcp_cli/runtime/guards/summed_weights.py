"""Verify at the first loss that the gradients of every weight it trains are reduced over ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fcp_cli.errors import RunError

_NO_MODEL = (
    "steps() was given no model, so nothing sums the gradients of {name} over the {ranks} ranks: pass the model to "
    "steps(), or, where the script sums them itself, fcp_cli.runtime.GradientSync()"
)
_OTHER_MODEL = (
    "the loss trains {name}, which is not in the model given to steps(), so its gradients would not be summed over the "
    "{ranks} ranks: give steps() one module that holds all that is trained, for example an nn.ModuleList of them"
)


def require_summed(loss: Tensor, summed: frozenset[int] | None, *, ranks: int, place: str) -> None:
    """Raise RunError if a loss trains a weight whose gradients are not reduced.

    Args:
        loss: loss with its graph, which is walked once: a few microseconds per node.
        summed: ids of the parameters whose gradients are reduced, or None if there are none.
        ranks: number of ranks of the job.
        place: step, micro-batch and rank, for the message.
    """
    for parameter in _trained_by(loss):
        if summed is None or id(parameter) not in summed:
            said = _NO_MODEL if summed is None else _OTHER_MODEL
            raise RunError(f"{place}: {said.format(name=_name(parameter), ranks=ranks)}")


def _trained_by(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters in a loss's graph, except inside reentrant checkpoints, which have no graph yet."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        # Only nodes that accumulate a leaf's gradient have a `variable`.
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following


def _name(parameter: nn.Parameter) -> str:
    """Return the longest name of a parameter in any module of this process."""
    best = f"a weight of shape {list(parameter.shape)}"
    depth = -1
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # isinstance would resolve lazy proxies
            continue
        for name, found in module.named_parameters():
            if found is parameter and name.count(".") > depth:
                depth, best = name.count("."), f"{name} of a {type(module).__name__}"
    return best
