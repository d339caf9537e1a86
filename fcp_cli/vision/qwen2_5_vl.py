"""Qwen2.5-VL: builds sequences for a plan, and calls the vision encoder.

    def fetch(row):
        inputs = processor(...)  # or its stored fields
        return visual_sequence(model.config, inputs.input_ids[0], video_grid_thw=inputs.video_grid_thw, ...)

A frame pair is encoded like an image: both windowed and full attention stay within it. Time enters only through the
language model's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.util.arrays import IntArray
from fcp_cli.vision.grids import by_kind, grid_parts, run_tower
from fcp_cli.vision.parts import Kind, Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any,
    input_ids: Any,
    *,
    labels: Any = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    second_per_grid_ts: Any = None,
    pixel_values: Pixels | None = None,
    pixel_values_videos: Pixels | None = None,
) -> VisualSequence:
    """Build a sequence from the output of the model's processor.

    Args:
        config: configuration of the full model (`Qwen2_5_VLConfig`).
        input_ids: [tokens] with placeholders; those of a video are contiguous.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        image_grid_thw, video_grid_thw: [images or videos, 3] patches in time, height and width.
        second_per_grid_ts: [videos] seconds between frame pairs; None for 1, as in transformers.
        pixel_values, pixel_values_videos: [patches, values]; a function is called only on the encoding rank.
    """
    ids, vision = np.asarray(input_ids, dtype=np.int64), config.vision_config
    work = partial(_work, vision)
    images = list(grid_parts(config, ids, "image", image_grid_thw, pixel_values, work=work))
    videos = list(grid_parts(config, ids, "video", video_grid_thw, pixel_values_videos, work=work))
    seconds = [1.0] * len(videos) if second_per_grid_ts is None else list(second_per_grid_ts)
    if len(seconds) != len(videos):
        raise RunError(f"a sequence has {len(videos)} videos but {len(seconds)} second_per_grid_ts; give one for each")
    # The interval does not matter for images, which have a single part.
    intervals = [1.0] * len(images) + [vision.tokens_per_second * one for one in seconds]
    pictures = sorted(zip((*images, *videos), intervals, strict=True), key=lambda picture: picture[0][0].start_token)
    parts = tuple(chain.from_iterable(own for own, _ in pictures))
    positions = _position_ids(len(ids), pictures, vision.spatial_merge_size) if parts else None
    return VisualSequence(tokens=ids, labels=labels, parts=parts, position_ids=positions)


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return the embeddings [embeddings, 1, hidden] of this rank's parts, or of a blank patch if it has none.

    The blank patch makes DDP and FSDP hooks run on every rank; its embeddings are not used.

    Args:
        model: the `Qwen2_5_VLModel`.
        parts: the parts to encode.
        pixels: [patches, values]; None if there are none.
    """
    found: Tensor = run_tower(model, parts, pixels).pooler_output
    return found.unsqueeze(1)


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of the model's forward that replace pixels, by kind.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: kind of each token.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    per_image: dict[str, Any] = {kind: (chosen[:, 0],) for kind, chosen in by_kind(embeddings, kinds).items()}
    return {kind: BaseModelOutputWithPooling(pooler_output=chosen) for kind, chosen in per_image.items()}


def _work(vision: Any, height: int, width: int) -> float:
    """Count multiplications of all layers: seven matrix products per patch, two of attention per pair.

    Pairs are counted per part in full-attention layers and per window in others; windows at the right and bottom edges
    are smaller.
    """
    hidden, patches = vision.hidden_size, height * width
    side = vision.window_size // vision.spatial_merge_size // vision.patch_size * vision.spatial_merge_size
    full = len(vision.fullatt_block_indexes)
    pairs = full * patches**2 + (vision.depth - full) * _squares(height, side) * _squares(width, side)
    return float(vision.depth * patches * hidden * (4 * hidden + 3 * vision.intermediate_size) + 2 * hidden * pairs)


def _squares(length: int, side: int) -> int:
    """Return the sum of squared pieces when `length` is split at each multiple of `side`."""
    return int(length // side * side**2 + (length % side) ** 2)


def _position_ids(length: int, pictures: Sequence[tuple[tuple[VisualPart, ...], float]], merge: int) -> IntArray:
    """Return the time, height and width position of each token, [3, length], as `Qwen2_5_VLModel.get_rope_index`.

    Text advances all three equally. Frame pairs share heights and widths and are `interval` apart in time. Text after a
    picture continues after its longer side, whatever its duration.

    Args:
        length: number of tokens of the sequence.
        pictures: parts and time interval of each image and video, in token order.
        merge: patches along the side of a token.
    """
    positions = np.empty((3, length), dtype=np.int64)
    at = position = 0
    for parts, interval in pictures:
        start, frame_tokens = parts[0].start_token, parts[0].num_tokens
        stop = parts[-1].start_token + frame_tokens
        if stop - start != len(parts) * frame_tokens:
            raise RunError(
                f"the {len(parts) * frame_tokens} video placeholders from token {start} on are not contiguous"
            )
        positions[:, at:start] = position + np.arange(start - at)
        position += start - at
        height, width = parts[0].grid[0] // merge, parts[0].grid[1] // merge
        positions[0, start:stop] = position + np.repeat(_times(len(parts), interval), frame_tokens)
        positions[1, start:stop] = position + np.tile(np.repeat(np.arange(height), width), len(parts))
        positions[2, start:stop] = position + np.tile(np.tile(np.arange(width), height), len(parts))
        at, position = stop, position + max(height, width)
    positions[:, at:] = position + np.arange(length - at)
    return positions


def _times(frames: int, interval: Any) -> list[int]:
    # Computed with torch, like transformers, which rounds the product to float32 before truncating it.
    times: list[int] = (torch.arange(frames) * interval).long().tolist()
    return times
