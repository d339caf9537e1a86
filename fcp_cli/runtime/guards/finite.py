"""Detect a NaN or infinite loss before it has cost more than a step.

On the CPU a loss is checked when it is computed. On a device that would block the host in every micro-batch, so its
value is copied asynchronously and checked once it has arrived: in a later micro-batch, at the latest in the next step.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.metrics.timing import Clock

_ROWS_NAMED = 4


class _Copy(NamedTuple):
    place: str
    rows: tuple[int, ...]
    value: Tensor
    mark: Any


class LossWatch:
    """Stops a rank at its first loss that is not finite.

    Args:
        clock: clock of the session, which tells how far the device is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: deque[_Copy] = deque()

    def note(self, place: str, rows: tuple[int, ...], loss_sum: Tensor) -> None:
        """Check a loss (0-d, detached), immediately or once the device has computed it.

        Args:
            place: step, micro-batch and rank, for the message.
            rows: rows of the data in the micro-batch.
            loss_sum: sum of this rank's token losses.
        """
        if loss_sum.device.type == "cpu":
            _require_finite(place, rows, loss_sum)
            return
        # Pinned, or the copy would block the host.
        value = torch.empty_like(loss_sum, device="cpu", pin_memory=loss_sum.device.type == "cuda")
        value.copy_(loss_sum, non_blocking=True)
        self._under_way.append(_Copy(place, rows, value, self._clock.mark()))

    def look(self) -> None:
        """Raise RunError if a loss that has arrived is not finite; never wait."""
        while self._under_way and self._clock.has_passed(self._under_way[0].mark):
            copy = self._under_way.popleft()
            _require_finite(copy.place, copy.rows, copy.value)


def _require_finite(place: str, rows: tuple[int, ...], loss_sum: Tensor) -> None:
    value = float(loss_sum)
    if math.isfinite(value):
        return
    named = ", ".join(map(str, rows[:_ROWS_NAMED])) + (", ..." if len(rows) > _ROWS_NAMED else "")
    raise RunError(
        f"{place}: the loss is {value} (rows {named} of the data); look at these rows, lower the learning rate, or "
        "skip such steps with on_nan='skip-step' (--on-nan skip-step)"
    )
