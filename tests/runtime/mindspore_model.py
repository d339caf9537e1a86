"""A small decoder as plain arrays, for the two frameworks that must compute the same with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 24, 4, 2, 6, 2
LONGEST = 128

Weight = TypeVar("Weight")


def initial_weights() -> dict[str, npt.NDArray[np.float32]]:
    """By name, in the order in which gradients are compared."""
    draw = np.random.default_rng(7)
    shapes = {"tokens": (VOCABULARY, WIDTH), "positions": (LONGEST, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"q{layer}": (WIDTH, HEADS * HEAD_DIM), f"o{layer}": (HEADS * HEAD_DIM, WIDTH)}
        shapes |= {f"{name}{layer}": (WIDTH, KV_HEADS * HEAD_DIM) for name in "kv"}
    return {name: draw.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}


def layers_of(named: Mapping[str, Weight]) -> Iterator[tuple[Weight, Weight, Weight, Weight]]:
    """The weights q, k, v and o of each layer."""
    for layer in range(LAYERS):
        q, k, v, o = (named[f"{name}{layer}"] for name in "qkvo")
        yield q, k, v, o


def tokens_of(row: int) -> list[int]:
    """What a manifest would lead to: any tokens, the same for everybody."""
    values: list[int] = np.random.default_rng(row).integers(0, VOCABULARY, LONGEST).tolist()
    return values
