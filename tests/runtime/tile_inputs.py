"""Sequences with images and videos, which are cut into tiles: what the processors of InternVL and Gemma 3 give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.runtime.grid_inputs import IMAGE, text

TILES = (0, 1, 3, 6, 9)
"""Tiles of a sequence by its kind: text alone, an image, an image of several tiles, a video, and many images."""
TILE_TOKENS, TILE_PIXELS = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a processor gives for one sequence."""

    input_ids: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    pixel_values: Tensor

    @property
    def visual(self) -> dict[str, Tensor]:
        """Arguments of the model, which takes no empty tensors."""
        return {"pixel_values": self.pixel_values} if len(self.pixel_values) else {}


def inputs_of(row: int) -> Inputs:
    """Sequence `row` of an endless data set, of kind `row % 5`."""
    draw = np.random.default_rng(row)
    tiles = TILES[row % 5]
    pieces: list[list[int]] = [text(draw)]
    for _ in range(tiles):  # tiles of an image follow each other at once, images and frames have text between them
        pieces += [[IMAGE] * TILE_TOKENS, text(draw) if draw.random() < 0.5 else []]
    pieces.append(text(draw))
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    pixels = draw.standard_normal((tiles, 3, TILE_PIXELS, TILE_PIXELS))
    return Inputs(input_ids=ids, labels=np.where(ids == IMAGE, -100, ids), pixel_values=torch.from_numpy(pixels))
