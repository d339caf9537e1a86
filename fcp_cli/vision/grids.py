"""Split processor output into encoder parts: patch grids (with the call of Qwen's towers) and square tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.util.arrays import IntArray
from fcp_cli.vision.parts import Kind, PixelReader, PixelRows, Pixels, VisualPart, VisualSequence


def grid_parts(
    config: Any,
    ids: IntArray,
    kind: Kind,
    grid_thw: Any,
    pixels: Pixels | None,
    *,
    work: Callable[[int, int], float],
) -> Iterator[tuple[VisualPart, ...]]:
    """Yield the parts of each image or video of a sequence, in the order of their placeholders.

    Args:
        config: configuration of the full model.
        ids: [tokens] with placeholders.
        kind: whether images or videos.
        grid_thw: [images or videos, 3] patches in time, height and width; None if there are none.
        pixels: [patches, values]; None if there are none.
        work: encoder work of a part, from its height and width in patches.
    """
    places = np.flatnonzero(ids == (config.image_token_id if kind == "image" else config.video_token_id))
    grids = np.zeros((0, 3), dtype=np.int64) if grid_thw is None else np.asarray(grid_thw, dtype=np.int64)
    area = config.vision_config.spatial_merge_size**2
    wanted = int(grids.prod(axis=1).sum()) // area
    if wanted != len(places):
        raise RunError(
            f"a sequence has {len(places)} {kind} placeholders (token {ids[places[0]] if len(places) else 'none'}), "
            f"but its grids make {wanted} tokens; give the processor's {kind}_grid_thw of this sequence"
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
                raise RunError(f"the {tokens} {kind} placeholders from token {start} on are not contiguous")
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


def tiled_sequence(
    input_ids: Any, *, labels: Any, pixel_values: Pixels | None, placeholder: int, tokens_per_tile: int, side: int
) -> VisualSequence:
    """Build a sequence of equal-sized tiles, encoded independently, from the output of the processor.

    Args:
        input_ids: [tokens] with `tokens_per_tile` placeholders per tile.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        pixel_values: [tiles, channels, height, width]; a function is called only on the encoding rank.
        placeholder: placeholder token of images.
        tokens_per_tile: visual tokens of a tile.
        side: side of a tile, in patches.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    places = np.flatnonzero(ids == placeholder)
    size = tokens_per_tile
    tiles, rest = divmod(len(places), size)
    is_asked = pixel_values is None or callable(pixel_values) or isinstance(pixel_values, PixelReader)
    given = tiles if is_asked else len(pixel_values)  # type: ignore[arg-type]
    if rest or given != tiles or (tiles and pixel_values is None):
        raise RunError(
            f"a sequence has {len(places)} placeholders (token {placeholder}), {size} for each tile, but "
            f"{'no' if pixel_values is None else given} tiles; give the processor's pixel_values of this sequence"
        )
    images = tiles * [((side, side), size, 1.0)]
    return VisualSequence(
        tokens=ids, labels=labels, parts=image_parts(places, images, pixel_values, words="placeholders")
    )


def image_parts(
    places: IntArray, images: Sequence[tuple[tuple[int, int], int, float]], pixels: Pixels | None, *, words: str
) -> tuple[VisualPart, ...]:
    """Return the parts of images or tiles, each one row of `pixels`, in the order of their placeholders.

    Args:
        places: [placeholders] their positions in the sequence.
        images: (patch grid, tokens, work) of each; the tokens add up to the number of placeholders.
        pixels: [images, ...]; None if there are none.
        words: name of the placeholders in messages.
    """
    if pixels is None:
        return ()
    parts, token = [], 0
    for number, (grid, tokens, work) in enumerate(images):
        start = int(places[token])
        if places[token + tokens - 1] - start != tokens - 1:
            raise RunError(f"the {tokens} {words} from token {start} on are not contiguous")
        rows = PixelRows(pixels, number, number + 1)
        parts.append(VisualPart(kind="image", start_token=start, num_tokens=tokens, work=work, grid=grid, pixels=rows))
        token += tokens
    return tuple(parts)


def run_tower(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Any:
    """Run a model's vision tower on this rank's parts, or on a blank patch if it has none.

    The blank patch makes DDP and FSDP hooks run on every rank; its embedding is not used.

    Args:
        model: base model; `visual` is the tower.
        parts: the parts to encode.
        pixels: [patches, values]; None if there are none.
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
    """Split embeddings [visual tokens, ...] into those of images and those of videos.

    Both keys are always present, so that the autograd graph of every rank reaches the encoder.
    """
    both: tuple[Kind, ...] = ("image", "video")
    return {kind: embeddings[[index for index, found in enumerate(kinds) if found == kind]] for kind in both}


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of a model's forward that replace the pixels of square tiles.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: kind of each token; all are images here.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return {"image": BaseModelOutputWithPooling(pooler_output=embeddings.transpose(0, 1))}
