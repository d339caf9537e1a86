"""Recomputation as needed: levels from none to all but attention, of which each rank mixes two by its own tokens.

Kept bytes are linear in the share of layers of a level. With T_j tokens a rank holds all layers at level j, so that t
tokens from T_j to T_(j+1) need the share T_(j+1) (t - T_j) / (t (T_(j+1) - T_j)) of the layers at level j + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.errors import ProfileError
from fcp_cli.recipe import LayerRecompute
from fcp_cli.validation import Count, NonNegative

MOST_LINES: Final = 3
_ROUNDING: Final = 1e-9  # of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeLevel:
    """A kind of recomputation that layers may run with.

    Attributes:
        tokens: the tokens that a rank holds if all layers run with it.
        seconds_per_token: the seconds per token of all layers, longer than with the first level.
    """

    recompute: LayerRecompute
    tokens: Count
    seconds_per_token: NonNegative = 0.0


def recomputation_lines(levels: Sequence[RecomputeLevel]) -> FloatArray:
    """Return [3, 2] the slope per token and the seconds to subtract of each line; zeros if there are fewer."""
    lines = np.zeros((MOST_LINES, 2))
    for row, (low, high) in enumerate(pairwise(levels)):
        start, end = low.seconds_per_token * low.tokens, high.seconds_per_token * high.tokens
        slope = (end - start) / (high.tokens - low.tokens)
        lines[row] = slope, slope * low.tokens - start
    return lines


def convex(levels: Sequence[RecomputeLevel]) -> tuple[RecomputeLevel, ...]:
    """Return the levels of the lower convex hull of seconds over tokens: others gain nothing over a mix of two."""
    kept: list[RecomputeLevel] = []
    # Of equally many tokens the dearer first, so that the cheaper one replaces it.
    for level in sorted(levels, key=lambda one: (one.tokens, -one.seconds_per_token)):
        while kept and (kept[-1].tokens == level.tokens or kept[-1].seconds_per_token >= level.seconds_per_token):
            kept.pop()  # holds no more tokens, and takes no less time
        while len(kept) > 1 and _rate(kept[-2], kept[-1]) >= _rate(kept[-1], level):
            kept.pop()
        kept.append(level)
    return tuple(kept)


def check_levels(levels: Sequence[RecomputeLevel], where: str) -> None:
    """Refuse levels that are no mix of two: of a file.

    Raises:
        ProfileError: they are too many, do not rise, or are not convex.
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
    """Return the seconds of one more token of a rank between two levels."""
    return (high.seconds_per_token * high.tokens - low.seconds_per_token * low.tokens) / (high.tokens - low.tokens)


def layers_by_level(levels: Sequence[RecomputeLevel], tokens: int, layers: int) -> tuple[int, int]:
    """Return the level that a rank of so many tokens needs, and how many of its first layers run with it.

    The other layers run with the level before. Every rank may choose by its own tokens: no level runs a ring again.

    Args:
        levels: the levels of the plan's profile.
        tokens: the tokens of the rank in the micro-batch; more than the last level holds recompute all layers by that.
        layers: the layers of the model.
    """
    if tokens <= levels[0].tokens:
        return 0, layers
    for number, (low, high) in enumerate(pairwise(levels), 1):
        if tokens <= high.tokens:
            return number, whole_layers(_share(low, high, tokens), layers)
    return len(levels) - 1, layers


def whole_layers(share: float, layers: int) -> int:
    """Return how many of some layers are at least a share of them."""
    # A share that is whole but for rounding must not cost a layer more.
    return min(layers, math.ceil(layers * share - _ROUNDING))


def _share(low: RecomputeLevel, high: RecomputeLevel, tokens: float) -> float:
    """Return the share of layers at the higher of two levels, of which so many tokens need both."""
    return high.tokens * (1.0 - low.tokens / tokens) / (high.tokens - low.tokens)


def seconds_by_stage(levels: Sequence[RecomputeLevel], held: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of recomputation per token, of each stage of a pipeline; () unless there are two levels.

    A stage runs as many of its layers at the higher level as it needs to hold the tokens that it has in flight.

    Args:
        levels: two; a level's `tokens` are here the tokens in flight that fit if all layers run with it.
        held: [stages] tokens of all micro-batches that a stage has in flight, times its share of the model's layers.
    """
    if len(levels) != 2:
        return ()
    low, high = levels
    return tuple(min(1.0, max(0.0, _share(low, high, one))) * high.seconds_per_token for one in held)


def cheapest_tokens(levels: Sequence[RecomputeLevel], fixed_seconds: float) -> int:
    """Return the tokens of a micro-batch at which a token takes the least of its fixed seconds and recomputation."""
    # On a line a token takes slope + (fixed - subtracted) / tokens, which falls as long as `fixed` is the larger.
    for level, (_slope, subtracted) in zip(levels, recomputation_lines(levels), strict=False):
        if subtracted >= fixed_seconds:
            return level.tokens
    return levels[-1].tokens
