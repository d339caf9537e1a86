"""Sequences with images and videos, as the processors of every family give them; endless data sets of five kinds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB_SIZE, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
TEXT_ONLY, ONE_IMAGE, MANY_IMAGES, ONE_VIDEO, BOTH = range(5)
PATCH_VALUES = 3 * 2 * 4 * 4
TILE_TOKENS, TILE_PIXELS = 4, 8
KERNEL, PATCH, MOST_PATCHES = 2, 2, 24
"""Of Gemma 4: patches of a token's side, pixels of a patch's side, and patches to which an image is padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a processor gives for one sequence.

    Attributes:
        pictures: arguments of the model besides the tokens; empty where there is nothing of a kind.
    """

    input_ids: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    pictures: Mapping[str, Tensor]

    @property
    def visual(self) -> dict[str, Tensor]:
        """Arguments of the model, which takes no empty tensors."""
        return {name: values for name, values in self.pictures.items() if len(values)}


InputsOf = Callable[[int], Inputs]


def of_grids(row: int, *, stamped: bool) -> Inputs:
    """Grids of patches, as of Qwen; stamped: a time stamp stands before every frame, else each video has its seconds."""
    draw = np.random.default_rng(row)
    kind = row % 5
    images = {ONE_IMAGE: 1, MANY_IMAGES: 3, BOTH: 2}.get(kind, 0)
    image_grids = [(1, *_even(draw, 2)) for _ in range(images)]
    video_grids = [(int(draw.integers(2, 5)), *_even(draw, 2))] if kind in (ONE_VIDEO, BOTH) else []
    pieces: list[Sequence[int]] = [_text(draw)]
    for _, height, width in image_grids:
        pieces += [[START], [IMAGE] * (height * width // 4), [END], _text(draw)]
    for frames, height, width in video_grids:
        tokens = height * width // 4
        for _ in range(frames if stamped else 0):
            pieces += [_text(draw), [START], [VIDEO] * tokens, [END]]
        if not stamped:
            pieces += [[START], [VIDEO] * (frames * tokens), [END]]
        pieces.append(_text(draw))
    ids = _joined(pieces)
    labels = np.where((ids >= IMAGE) | (draw.random(len(ids)) < 0.3), -100, ids)
    pictures = {
        "image_grid_thw": torch.tensor(image_grids, dtype=torch.int64).reshape(-1, 3),
        "video_grid_thw": torch.tensor(video_grids, dtype=torch.int64).reshape(-1, 3),
        "pixel_values": _pixels(draw, image_grids),
        "pixel_values_videos": _pixels(draw, video_grids),
    }
    if not stamped:
        pictures["second_per_grid_ts"] = torch.from_numpy(draw.uniform(0.2, 3.0, size=len(video_grids)))
    return Inputs(input_ids=ids, labels=labels, pictures=pictures)


def of_tiles(row: int) -> Inputs:
    """Tiles of one size, as of InternVL and Gemma 3: of none, an image, a cut image, a video, and many images."""
    draw = np.random.default_rng(row)
    tiles = (0, 1, 3, 6, 9)[row % 5]
    # Tiles of an image follow each other at once, images and frames have text between them.
    ids = _between_text(draw, [TILE_TOKENS] * tiles)
    pixels = draw.standard_normal((tiles, 3, TILE_PIXELS, TILE_PIXELS))
    return _images(ids, pixel_values=torch.from_numpy(pixels))


def of_shapes(row: int) -> Inputs:
    """Images of any shape, as of Gemma 4: none, one, and several, of which some follow each other at once."""
    draw = np.random.default_rng(row)
    images = (0, 1, 3, 4, 2)[row % 5]
    grids = [(KERNEL * int(draw.integers(1, 4)), KERNEL * int(draw.integers(1, 3))) for _ in range(images)]
    ids = _between_text(draw, [height * width // KERNEL**2 for height, width in grids])
    pixels = draw.random((len(grids), MOST_PATCHES, 3 * PATCH**2))
    for image, (height, width) in zip(pixels, grids, strict=True):
        image[height * width :] = 0
    none = torch.empty(0, MOST_PATCHES, 2, dtype=torch.int64)
    positions = torch.stack([positions_of_patches(*grid) for grid in grids]) if grids else none
    return _images(ids, pixel_values=torch.from_numpy(pixels), image_position_ids=positions)


def positions_of_patches(height: int, width: int) -> Tensor:
    """Of an image, as Gemma 4's image processor makes them."""
    grid = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
    found = torch.stack(grid, dim=-1).reshape(height * width, 2)
    return torch.nn.functional.pad(found, (0, 0, 0, MOST_PATCHES - len(found)), value=-1)


def image_spans(inputs: Inputs) -> list[tuple[int, int]]:
    """Where the images of a sequence lie; those that follow each other at once are one."""
    is_image = np.concatenate(([False], inputs.input_ids == IMAGE, [False]))
    return [(start, stop) for start, stop in np.flatnonzero(is_image[1:] != is_image[:-1]).reshape(-1, 2).tolist()]


def _images(ids: np.ndarray[Any, np.dtype[np.int64]], **pictures: Tensor) -> Inputs:
    return Inputs(input_ids=ids, labels=np.where(ids == IMAGE, -100, ids), pictures=pictures)


def _between_text(draw: np.random.Generator, sizes: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Text, pictures of so many tokens with text behind half of them, and text."""
    pieces: list[Sequence[int]] = [_text(draw)]
    for size in sizes:
        pieces += [[IMAGE] * size, _text(draw) if draw.random() < 0.5 else []]
    return _joined([*pieces, _text(draw)])


def _joined(pieces: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])


def _text(draw: np.random.Generator) -> list[int]:
    """One to five tokens that are no image's."""
    return draw.integers(0, IMAGE, size=draw.integers(1, 6)).tolist()  # type: ignore[no-any-return]


def _even(draw: np.random.Generator, count: int) -> list[int]:
    return [2 * int(side) for side in draw.integers(1, 5, size=count)]


def _pixels(draw: np.random.Generator, grids: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(draw.standard_normal((sum(int(np.prod(grid)) for grid in grids), PATCH_VALUES)))
