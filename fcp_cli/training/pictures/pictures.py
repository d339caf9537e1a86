"""Conversations with pixels: each picture is decoded in advance, and only on the rank that encodes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.manifest.sources.media.pictures import PictureRecords, PictureRow
from fcp_cli.runtime.data.followed_step import require_length
from fcp_cli.training.pictures.decoding import BadPictureError, Values, Wanted
from fcp_cli.training.pictures.pixel_pool import PixelPool
from fcp_cli.vision import gemma3, gemma4, internvl, qwen2_5_vl, qwen3_vl
from fcp_cli.vision.parts import Pixels, PixelsRead, VisualSequence
from fcp_cli.vision.processor import VisionProcessor, Visual


class PictureVisuals:
    """A `Fetch` for a manifest of conversations about images and videos.

    Args:
        records: conversations.
        lengths: [rows] sequence lengths in the manifest.
        config: configuration of the full model.
        pool: decoder processes.
    """

    def __init__(self, records: PictureRecords, lengths: Any, config: Any, pool: PixelPool) -> None:
        self._records = records
        self._lengths = lengths
        self._config = config
        self._pool = pool

    def __call__(self, row: int) -> VisualSequence:
        found = self._records.read(row)
        require_length(len(found.encoded.tokens), int(self._lengths[row]), row=row)
        sizes = list(zip(found.sizes, found.visuals, strict=True))
        return sequence_of_family(
            self._config,
            found.encoded.tokens,
            found.encoded.labels,
            images=[visual for size, visual in sizes if size.frames is None],
            videos=[visual for size, visual in sizes if size.frames is not None],
            pixels=partial(self._pixels, row, found),
        )

    def _pixels(self, row: int, found: PictureRow, is_video: bool | None) -> RowPixels:
        """Return the pixels of a row's images, its videos, or both."""
        chosen = [
            index for index, size in enumerate(found.sizes) if is_video is None or (size.frames is not None) == is_video
        ]
        return RowPixels(row, found, chosen, self._records.processor, self._pool)

    def close(self) -> None:
        """End the decoder processes."""
        self._pool.close()


def sequence_of_family(
    config: Any,
    ids: Any,
    labels: Any,
    *,
    images: Sequence[Visual],
    videos: Sequence[Visual],
    pixels: Callable[[bool | None], Pixels],
) -> VisualSequence:
    """Build a sequence for the model's family.

    Args:
        config: configuration of the full model.
        ids: [tokens] with placeholders.
        labels: [tokens], -100 for tokens not trained.
        images, videos: pictures of each kind, in placeholder order.
        pixels: returns pixels of images (False), videos (True), or both (None).
    """
    module = FAMILIES_OF_ROWS.get(config.model_type)
    if module is not None:
        rows: VisualSequence = module.visual_sequence(config, ids, labels=labels, pixel_values=pixels(None))
        return rows
    if config.model_type == "gemma4":
        positions = gemma4.position_ids([visual.grid[1:] for visual in images])
        return gemma4.visual_sequence(
            config, ids, labels=labels, pixel_values=pixels(False), image_position_ids=positions
        )
    pictures: dict[str, Any] = {
        "image_grid_thw": _grids(images),
        "video_grid_thw": _grids(videos),
        "pixel_values": pixels(False),
        "pixel_values_videos": pixels(True),
    }
    if config.model_type == "qwen2_5_vl":
        seconds = [visual.part_seconds for visual in videos]
        return qwen2_5_vl.visual_sequence(config, ids, labels=labels, second_per_grid_ts=seconds, **pictures)
    return qwen3_vl.visual_sequence(config, ids, labels=labels, **pictures)


FAMILIES_OF_ROWS: Final[Mapping[str, Any]] = {"internvl": internvl, "gemma3": gemma3}
"""Families whose encoders process equal-sized squares, by model type."""


def _grids(visuals: Sequence[Visual]) -> IntArray:
    return np.array([visual.grid for visual in visuals], np.int64).reshape(-1, 3)


class RowPixels:
    """A `PixelReader` for the concatenated pixels of some pictures of a row."""

    def __init__(
        self,
        row: int,
        found: PictureRow,
        chosen: Sequence[int],
        processor: VisionProcessor,
        pool: PixelPool,
    ) -> None:
        self._row = row
        self._found = found
        self._pool = pool
        self._shape = processor.row_shape
        self._starts: list[tuple[int, int, int]] = []  # first row, end, picture
        at = 0
        for index in chosen:
            visual = found.visuals[index]
            rows = visual.grid[0] * processor.rows_per_part(visual)
            self._starts.append((at, at + rows, index))
            at += rows

    def begin(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], PixelsRead]:
        """Start decoding the pictures of these row ranges, each once; a range lies within a picture."""
        begun = []
        for first, end, index in self._starts:
            own = [number for number, (start, _) in enumerate(ranges) if first <= start < end]
            if own:
                wanted = Wanted(
                    picture=self._found.pictures[index],
                    size=self._found.sizes[index],
                    visual=self._found.visuals[index],
                    ranges=tuple((ranges[number][0] - first, ranges[number][1] - first) for number in own),
                )
                begun.append((own, index, self._pool.begin(wanted)))
        return partial(self._finish, ranges, begun)

    def _finish(
        self, ranges: Sequence[tuple[int, int]], begun: Sequence[tuple[list[int], int, Callable[[], list[Values]]]]
    ) -> PixelsRead:
        rows: dict[int, Tensor] = {}
        problem = None
        for own, index, wait in begun:
            found = _found(wait)
            if isinstance(found, str):
                name = self._found.pictures[index].name
                problem = problem or f"row {self._row} of the manifest ({self._found.place}): {name} {found}"
            else:
                rows.update(zip(own, map(torch.from_numpy, found), strict=True))
        blank = [
            rows[number] if number in rows else torch.zeros(stop - start, *self._shape)
            for number, (start, stop) in enumerate(ranges)
        ]
        return PixelsRead(rows=blank, problem=problem)


def _found(wait: Callable[[], list[Values]]) -> list[Values] | str:
    """Return the decoded rows, or the error message."""
    try:
        return wait()
    except BadPictureError as error:
        return str(error)
