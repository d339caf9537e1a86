"""Sequences with images and videos, of which each is a grid of patches: what Qwen's processors give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB_SIZE, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT_ONLY, ONE_IMAGE, MANY_IMAGES, ONE_VIDEO, BOTH = range(5)
PATCH_VALUES = 3 * 2 * 4 * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a processor gives for one sequence; empty grids where there is nothing of a kind."""

    input_ids: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    image_grid_thw: Tensor
    video_grid_thw: Tensor
    pixel_values: Tensor
    pixel_values_videos: Tensor
    second_per_grid_ts: Tensor


def inputs_of(row: int, *, stamped: bool) -> Inputs:
    """Sequence `row` of an endless data set, of kind `row % 5`; stamped: a time stamp stands before every frame."""
    draw = np.random.default_rng(row)
    kind = row % 5
    images = {ONE_IMAGE: 1, MANY_IMAGES: 3, BOTH: 2}.get(kind, 0)
    image_grids = [(1, *_even(draw, 2)) for _ in range(images)]
    video_grids = [(int(draw.integers(2, 5)), *_even(draw, 2))] if kind in (ONE_VIDEO, BOTH) else []
    pieces: list[Sequence[int]] = [text(draw)]
    for _, height, width in image_grids:
        pieces += [[START], [IMAGE] * (height * width // 4), [END], text(draw)]
    for frames, height, width in video_grids:
        tokens = height * width // 4
        for _ in range(frames if stamped else 0):
            pieces += [text(draw), [START], [VIDEO] * tokens, [END]]
        if not stamped:
            pieces += [[START], [VIDEO] * (frames * tokens), [END]]
        pieces.append(text(draw))
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    labels = np.where((ids >= IMAGE) | (draw.random(len(ids)) < 0.3), -100, ids)
    return Inputs(
        input_ids=ids,
        labels=labels,
        image_grid_thw=torch.tensor(image_grids, dtype=torch.int64).reshape(-1, 3),
        video_grid_thw=torch.tensor(video_grids, dtype=torch.int64).reshape(-1, 3),
        pixel_values=_pixels(draw, image_grids),
        pixel_values_videos=_pixels(draw, video_grids),
        second_per_grid_ts=torch.from_numpy(draw.uniform(0.2, 3.0, size=len(video_grids))),
    )


def _even(draw: np.random.Generator, count: int) -> list[int]:
    return [2 * int(side) for side in draw.integers(1, 5, size=count)]


def text(draw: np.random.Generator) -> list[int]:
    """One to five tokens that are no image's."""
    return draw.integers(0, IMAGE, size=draw.integers(1, 6)).tolist()  # type: ignore[no-any-return]


def _pixels(draw: np.random.Generator, grids: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(draw.standard_normal((sum(int(np.prod(grid)) for grid in grids), PATCH_VALUES)))


def logits_of(model: Any, inputs: Inputs, **of_videos: Tensor) -> Tensor:
    """What transformers itself computes for the sequence, positions included."""
    ids = torch.from_numpy(inputs.input_ids)[None]
    visual: dict[str, Tensor] = {}
    if len(inputs.image_grid_thw):
        visual |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
    if len(inputs.video_grid_thw):
        visual |= {"pixel_values_videos": inputs.pixel_values_videos, "video_grid_thw": inputs.video_grid_thw}
        visual |= of_videos
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    logits: Tensor = model(input_ids=ids, mm_token_type_ids=types, **visual).logits
    return logits
