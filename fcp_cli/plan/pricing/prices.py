"""Predicted seconds of micro-batches, apart from the cost model that gives them: training needs nothing of that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.plan.pricing.speeds import Speeds, slowest_speeds


class Prices(NamedTuple):
    """Costs of micro-batches.

    Attributes:
        seconds: [microbatches] 0 for a pack without sequences.
        encoder_seconds: [microbatches] the part of a vision encoder; None where all ranks of a wave share it.
        language_seconds: [microbatches] the part of the language model's matrices; None as above.
        rank_tokens: [microbatches] that each of the ranks holds; None as above.
    """

    seconds: FloatArray
    encoder_seconds: FloatArray | None = None
    language_seconds: FloatArray | None = None
    rank_tokens: FloatArray | None = None

    def take(self, rows: IntArray) -> Prices:
        """Return the prices of some of the micro-batches, in this order."""
        return Prices(*(None if values is None else values[rows] for values in self))  # type: ignore[arg-type]

    def spread(self, working: npt.NDArray[np.bool_]) -> Prices:
        """Return the prices of more micro-batches, of which these are the working ones in their order; else 0."""

        def spread(values: FloatArray) -> FloatArray:
            found = np.zeros(len(working))
            found[working] = values
            return found

        return Prices(*(None if values is None else spread(values) for values in self))  # type: ignore[arg-type]

    def at_speeds(self, speeds: Speeds | None, rank_offsets: IntArray, ranks: Int32Array) -> Prices:
        """Return the prices on ranks of these speeds: a micro-batch takes as long as on its slowest rank."""
        if speeds is None:
            return self
        slowest = slowest_speeds(speeds, rank_offsets, ranks)
        encoder, language = self.encoder_seconds, self.language_seconds
        return self._replace(
            seconds=self.seconds / slowest,
            encoder_seconds=None if encoder is None else encoder / slowest,
            language_seconds=None if language is None else language / slowest,
        )
