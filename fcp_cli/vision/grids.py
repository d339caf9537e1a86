"""Base of Qwen's vision towers: pictures of any size as grids of patches, each image and frame pair encoded alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.vision.parts import Kind, PixelRows, Pixels, VisualPart


def grid_parts(
    config: Any,
    ids: IntArray,
    kind: Kind,
    grid_thw: Any,
    pixels: Pixels | None,
    *,
    work: Callable[[int, int], float],
) -> Iterator[tuple[VisualPart, ...]]:
    """Yield the parts of each image, or of each video, of a sequence, in the order of their placeholders.

    Args:
        config: the configuration of the whole model.
        ids: [tokens] with placeholders.
        kind: whether images or videos.
        grid_thw: [images or videos, 3] patches in time, height and width; None for none.
        pixels: the pixels of them, [patches, values]; None if there are none.
        work: the work of the encoder for one part, of its height and width in patches.
    """
    places = np.flatnonzero(ids == (config.image_token_id if kind == "image" else config.video_token_id))
    grids = np.zeros((0, 3), dtype=np.int64) if grid_thw is None else np.asarray(grid_thw, dtype=np.int64)
    area = config.vision_config.spatial_merge_size**2
    wanted = int(grids.prod(axis=1).sum()) // area
    if wanted != len(places):
        raise RunError(
            f"a sequence has {len(places)} {kind} placeholders (token {ids[places[0]] if len(places) else 'none'}), "
            f"but its grids make {wanted} tokens; give the processor's {kind}_grid_thw of this very sequence"
        )
    if pixels is None:
        if not wanted:
            return
        raise RunError(f"a sequence has {kind}s but no {'pixel_values' if kind == 'image' else 'pixel_values_videos'}")
    token = patch = 0
    for frames, height, width in grids.tolist():
        patches, tokens = height * width, height * width // area
        parts = []
        for _ in range(frames):
            start = int(places[token])
            if places[token + tokens - 1] - start != tokens - 1:
                raise RunError(f"the {tokens} {kind} placeholders from token {start} on are not all together")
            parts.append(
                VisualPart(
                    kind=kind,
                    start_token=start,
                    num_tokens=tokens,
                    work=work(height, width),
                    grid=(height, width),
                    pixels=PixelRows(pixels, patch, patch + patches),
                )
            )
            token, patch = token + tokens, patch + patches
        yield tuple(parts)


def run_tower(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Any:
    """Return the output of a model's tower for this member's parts; for a blank patch if it has none.

    The blank one keeps every rank in step with the hooks of DDP and FSDP; its embedding is not used.

    Args:
        model: the base model, whose `visual` is the tower.
        parts: the parts to encode.
        pixels: [patches, values] of all of them; None if there are none.
    """
    visual = model.visual
    grids = [(1, *part.grid) for part in parts]
    if pixels is None:
        merge, vision = visual.spatial_merge_size, model.config.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros(merge * merge, values, device=visual.device)
        grids = [(1, merge, merge)]
    return visual(
        pixels.to(visual.device, visual.dtype), grid_thw=torch.tensor(grids, device=visual.device), return_dict=True
    )


def by_kind(embeddings: Tensor, kinds: Sequence[Kind]) -> Mapping[Kind, Tensor]:
    """Return the embeddings [visual tokens, ...] of images and those of videos.

    Both are always there, be they empty, so that every rank's graph has a path to its encoder.
    """
    both: tuple[Kind, ...] = ("image", "video")
    return {kind: embeddings[[index for index, found in enumerate(kinds) if found == kind]] for kind in both}
