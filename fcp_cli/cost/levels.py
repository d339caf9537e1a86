"""As-needed recomputation: levels from none to all but attention; each rank mixes two levels by its own tokens.

Kept bytes are linear in the share of layers at a level. A rank fits T_j tokens with all layers at level j, so t tokens
between T_j and T_(j+1) need the share T_(j+1) (t - T_j) / (t (T_(j+1) - T_j)) of the layers at level j + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from fcp_cli.cost.recipe import LayerRecompute
from fcp_cli.errors import ProfileError
from fcp_cli.util.arrays import FloatArray
from fcp_cli.util.validation import Count, NonNegative

MOST_LINES: Final = 3
_ROUNDING: Final = 1e-9  # of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeLevel:
    """Recomputation level of a layer.

    Attributes:
        tokens: tokens that a rank fits if all layers use it.
        seconds_per_token: extra seconds per token over the first level if all layers use it.
    """

    recompute: LayerRecompute
    tokens: Count
    seconds_per_token: NonNegative = 0.0


def recomputation_lines(levels: Sequence[RecomputeLevel]) -> FloatArray:
    """Return [3, 2] slope per token and seconds to subtract of each line, padded with zeros."""
    lines = np.zeros((MOST_LINES, 2))
    for row, (low, high) in enumerate(pairwise(levels)):
        start, end = low.seconds_per_token * low.tokens, high.seconds_per_token * high.tokens
        slope = (end - start) / (high.tokens - low.tokens)
        lines[row] = slope, slope * low.tokens - start
    return lines


def convex(levels: Sequence[RecomputeLevel]) -> tuple[RecomputeLevel, ...]:
    """Return the levels on the lower convex hull of seconds over tokens; a mix of two beats all others."""
    kept: list[RecomputeLevel] = []
    # On equal tokens the slower level comes first, so that the faster one replaces it.
    for level in sorted(levels, key=lambda one: (one.tokens, -one.seconds_per_token)):
        while kept and (kept[-1].tokens == level.tokens or kept[-1].seconds_per_token >= level.seconds_per_token):
            kept.pop()  # dominated by `level`
        while len(kept) > 1 and _rate(kept[-2], kept[-1]) >= _rate(kept[-1], level):
            kept.pop()
        kept.append(level)
    return tuple(kept)


def check_levels(levels: Sequence[RecomputeLevel], where: str) -> None:
    """Validate the levels of a profile file.

    Raises:
        ProfileError: there are too many levels, or they are not ascending and convex.
    """
    if not levels:
        return
    if len(levels) > MOST_LINES + 1:
        raise ProfileError(f"{where} has {len(levels)} levels; at most {MOST_LINES + 1} are possible")
    if levels[0].seconds_per_token:
        raise ProfileError(
            f"{where}[0].seconds_per_token is {levels[0].seconds_per_token:g}; it must be 0: the profile's times are "
            "of the first level"
        )
    if any(high.tokens <= low.tokens for low, high in pairwise(levels)):
        raise ProfileError(f"{where}: tokens are {[level.tokens for level in levels]}; they must rise")
    rates = [0.0, *(_rate(low, high) for low, high in pairwise(levels))]
    if any(after < before * (1 - _ROUNDING) for before, after in pairwise(rates)):
        raise ProfileError(f"{where}: a further token takes {rates[1:]} seconds from level to level; these must rise")


def _rate(low: RecomputeLevel, high: RecomputeLevel) -> float:
    """Return the recomputation seconds of one more token of a rank between two levels."""
    return (high.seconds_per_token * high.tokens - low.seconds_per_token * low.tokens) / (high.tokens - low.tokens)


def layers_by_level(levels: Sequence[RecomputeLevel], tokens: int, layers: int) -> tuple[int, int]:
    """Return the level that a rank's tokens need, and the number of first layers that use it.

    The other layers use the level before. Ranks may choose independently, since no level recomputes a ring.

    Args:
        levels: levels of the plan's profile.
        tokens: tokens of the rank in the micro-batch; beyond the last level's, all layers use the last level.
        layers: number of layers of the model.
    """
    if tokens <= levels[0].tokens:
        return 0, layers
    for number, (low, high) in enumerate(pairwise(levels), 1):
        if tokens <= high.tokens:
            return number, whole_layers(_share(low, high, tokens), layers)
    return len(levels) - 1, layers


def whole_layers(share: float, layers: int) -> int:
    """Return the share of layers as a whole number, rounded up."""
    # Rounding errors of a whole share must not add a layer.
    return min(layers, math.ceil(layers * share - _ROUNDING))


def _share(low: RecomputeLevel, high: RecomputeLevel, tokens: float) -> float:
    """Return the share of layers at the higher of two levels for tokens between theirs."""
    return high.tokens * (1.0 - low.tokens / tokens) / (high.tokens - low.tokens)


def seconds_by_stage(levels: Sequence[RecomputeLevel], held: Sequence[float]) -> tuple[float, ...]:
    """Return [stages] the recomputation seconds per token of a pipeline, or () unless there are two levels.

    A stage uses the higher level for as many layers as its tokens in flight need.

    Args:
        levels: two levels, with `tokens` counting tokens in flight.
        held: [stages] tokens in flight, times the stage's share of the model's layers.
    """
    if len(levels) != 2:
        return ()
    low, high = levels
    return tuple(min(1.0, max(0.0, _share(low, high, one))) * high.seconds_per_token for one in held)


def cheapest_tokens(levels: Sequence[RecomputeLevel], fixed_seconds: float) -> int:
    """Return the tokens of a micro-batch that minimize fixed plus recomputation seconds per token."""
    # On a line a token costs slope + (fixed - subtracted) / tokens, which falls while fixed > subtracted.
    for level, (_slope, subtracted) in zip(levels, recomputation_lines(levels), strict=False):
        if subtracted >= fixed_seconds:
            return level.tokens
    return levels[-1].tokens
