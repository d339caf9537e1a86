"""Rank speeds relative to the cost profile: a rank of speed 0.7 takes 1 / 0.7 of its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

import numpy as np
from msgspec import Meta

from fcp_cli.arrays import FloatArray, Int32Array, IntArray

SLOWEST: Final = 0.01
QUICKEST: Final = 100.0
Speed = Annotated[float, Meta(ge=SLOWEST, le=QUICKEST, description=f"a number from {SLOWEST:g} to {QUICKEST:g}")]
Speeds: TypeAlias = tuple[float, ...]  # [ranks]


def named_speeds(speeds: Speeds | None) -> Mapping[str, float] | None:
    """Return the speeds other than 1 by rank number, in the form of a plan's metadata, or None if all are 1."""
    return {str(rank): speed for rank, speed in enumerate(speeds or ()) if speed != 1.0} or None


def speeds_of(named: Mapping[str, float] | None, num_ranks: int) -> Speeds | None:
    """Return [ranks] the speeds encoded by `named_speeds`, or None if all are 1; raise ValueError for unknown ranks."""
    if not named:
        return None
    speeds = [1.0] * num_ranks
    for rank, speed in named.items():
        if not (rank.isdecimal() and int(rank) < num_ranks):
            raise ValueError(f"{rank!r} is no rank of {num_ranks}")
        speeds[int(rank)] = speed
    return tuple(speeds)


def slowest_speeds(speeds: Speeds, rank_offsets: IntArray, ranks: Int32Array) -> FloatArray:
    """Return [groups] the speed of the slowest rank, which the others wait for in every ring hop."""
    return np.asarray(np.minimum.reduceat(np.array(speeds)[ranks], rank_offsets[:-1]))


def speeds_text(named: Mapping[str, float]) -> str:
    """Return a short description of rank speeds."""
    by_speed: dict[float, list[str]] = {}
    for rank, speed in named.items():
        by_speed.setdefault(speed, []).append(rank)
    shown = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks[:_SHOWN])}"
        f"{f' and {len(ranks) - _SHOWN} more' if len(ranks) > _SHOWN else ''} at {speed:g}"
        for speed, ranks in sorted(by_speed.items())
    ]
    return "; ".join(shown[:_SHOWN]) + ("; ..." if len(shown) > _SHOWN else "")


_SHOWN: Final = 4
