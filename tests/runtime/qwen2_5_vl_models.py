"""A small Qwen2.5-VL and sequences with images and videos for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.vision.parts import VisualSequence
from fcp_cli.vision.qwen2_5_vl import visual_sequence

VOCAB_SIZE, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
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


def inputs_of(row: int) -> Inputs:
    """Sequence `row` of an endless data set, of kind `row % 5`."""
    draw = np.random.default_rng(row)
    kind = row % 5
    images = {ONE_IMAGE: 1, MANY_IMAGES: 3, BOTH: 2}.get(kind, 0)
    image_grids = [(1, *_even(draw, 2)) for _ in range(images)]
    video_grids = [(int(draw.integers(2, 5)), *_even(draw, 2))] if kind in (ONE_VIDEO, BOTH) else []
    pieces: list[Sequence[int]] = [_text(draw)]
    for _, height, width in image_grids:
        pieces += [[START], [IMAGE] * (height * width // 4), [END], _text(draw)]
    for frames, height, width in video_grids:
        pieces += [[START], [VIDEO] * (frames * height * width // 4), [END], _text(draw)]
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


def _text(draw: np.random.Generator) -> Sequence[int]:
    return draw.integers(0, IMAGE, size=draw.integers(1, 6)).tolist()  # type: ignore[no-any-return]


def _pixels(draw: np.random.Generator, grids: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(draw.standard_normal((sum(int(np.prod(grid)) for grid in grids), PATCH_VALUES)))


def config() -> Any:
    import transformers

    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            # Windows of four patches: sides of two to eight patches make one window, several, and cut ones.
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def model() -> Any:
    """Unmodified, with random weights."""
    import transformers

    return transformers.Qwen2_5_VLForConditionalGeneration(config())


def sequence(inputs: Inputs, labels: Any) -> VisualSequence:
    return visual_sequence(
        config(),
        inputs.input_ids,
        labels=labels,
        image_grid_thw=inputs.image_grid_thw,
        video_grid_thw=inputs.video_grid_thw,
        second_per_grid_ts=inputs.second_per_grid_ts,
        pixel_values=inputs.pixel_values,
        pixel_values_videos=lambda start, stop: inputs.pixel_values_videos[start:stop],
    )


def logits_alone(model: Any, inputs: Inputs) -> Tensor:
    """What transformers itself computes for the sequence, positions included."""
    ids = torch.from_numpy(inputs.input_ids)[None]
    visual: dict[str, Tensor] = {}
    if len(inputs.image_grid_thw):
        visual |= {"pixel_values": inputs.pixel_values, "image_grid_thw": inputs.image_grid_thw}
    if len(inputs.video_grid_thw):
        visual |= {"pixel_values_videos": inputs.pixel_values_videos, "video_grid_thw": inputs.video_grid_thw}
        visual |= {"second_per_grid_ts": inputs.second_per_grid_ts}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    logits: Tensor = model(input_ids=ids, mm_token_type_ids=types, **visual).logits
    return logits
