"""Predicted seconds of micro-batches; separate from the cost model, so that training does not import that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.plan.pricing.speeds import Speeds, slowest_speeds


class Prices(NamedTuple):
    """Predicted costs of micro-batches.

    Attributes:
        seconds: [microbatches] total seconds; 0 for an empty pack.
        encoder_seconds: [microbatches] part of the vision encoder; None if all ranks of a wave share it.
        language_seconds: [microbatches] part of the language model's matrices; None as above.
        rank_tokens: [microbatches] tokens of each rank of the group; None as above.
    """

    seconds: FloatArray
    encoder_seconds: FloatArray | None = None
    language_seconds: FloatArray | None = None
    rank_tokens: FloatArray | None = None

    def take(self, rows: IntArray) -> Prices:
        """Return the prices of the micro-batches `rows`, in that order."""
        return Prices(*(None if values is None else values[rows] for values in self))  # type: ignore[arg-type]

    def spread(self, working: npt.NDArray[np.bool_]) -> Prices:
        """Scatter the prices to the set entries of `working`, in order; all other entries are 0."""

        def spread(values: FloatArray) -> FloatArray:
            found = np.zeros(len(working))
            found[working] = values
            return found

        return Prices(*(None if values is None else spread(values) for values in self))  # type: ignore[arg-type]

    def at_speeds(self, speeds: Speeds | None, rank_offsets: IntArray, ranks: Int32Array) -> Prices:
        """Return the prices scaled to rank speeds; the slowest rank determines the time of a micro-batch."""
        if speeds is None:
            return self
        slowest = slowest_speeds(speeds, rank_offsets, ranks)
        encoder, language = self.encoder_seconds, self.language_seconds
        return self._replace(
            seconds=self.seconds / slowest,
            encoder_seconds=None if encoder is None else encoder / slowest,
            language_seconds=None if language is None else language / slowest,
        )
