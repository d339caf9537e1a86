"""Visual token counts of processors with one pixel row per image, tile or frame: InternVL, Gemma 3 and Gemma 4.

Formulas follow transformers 5.24 (`got_ocr2`, `internvl`, `gemma3`, `gemma4`), and tests compare them with the library.
Default sizes are those of published checkpoints.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta

from fcp_cli.arrays import IntArray
from fcp_cli.validation import Count, Positive
from fcp_cli.vision.processor import Marks, Visual, Written

Tiles = Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")]


class _ImageRows:
    """Base of processors for which each tile, image or frame is a pixel row and an encoder part."""

    __slots__ = ()

    def describe(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @property
    def frames_per_part(self) -> int:
        return 1

    def rows_per_part(self, visual: Visual) -> int:
        return 1

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        return np.arange(frames)


class _SquarePixels(_ImageRows):
    """Base of processors whose pixel rows are equal-sized squares."""

    __slots__ = ()

    @property
    @abstractmethod
    def side(self) -> int:
        """Side of a square, in pixels."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        return 3, self.side, self.side

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        return self.side, self.side


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVision(_SquarePixels):
    """InternVL 2.5 and 3: square tiles in the grid with the closest aspect ratio, plus a thumbnail."""

    name: str = "internvl"
    tile_pixels: Count = 448
    patch_size: Count = 14
    tokens_per_tile: Count = 256
    min_tiles: Tiles = 1
    max_tiles: Tiles = 12

    @property
    def template_marks(self) -> int:
        return 1  # a line break; <img> and </img> count as part of the image

    @property
    def side(self) -> int:
        return self.tile_pixels

    def image(self, height: int, width: int) -> Visual:
        columns, rows = _best_grid(height, width, self.tile_pixels, self.min_tiles, self.max_tiles)
        tiles = columns * rows
        tiles += 1 if tiles > 1 else 0  # thumbnail, unless there is a single tile
        return self._visual(tiles, marks=2)

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        texts = tuple(("" if i == 0 else "\n") + f"Frame{i + 1}: " for i in range(frames))
        return self._visual(frames, marks=2 * frames, texts=texts)

    def marks(self, tokenizer: Any) -> Marks:
        pad: str = tokenizer.context_image_token
        return Marks(
            image=pad,
            video=tokenizer.video_token,
            image_pad=pad,
            video_pad=pad,
            start=tokenizer.start_image_token,
            end=tokenizer.end_image_token,
        )

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        tiles = visual.grid[0]
        if not is_video:
            return Written(text=f"{marks.start}{marks.image_pad}{marks.end}", runs=(tiles * self.tokens_per_tile,))
        text = "".join(f"{title}{marks.start}{marks.video_pad}{marks.end}" for title in visual.texts)
        return Written(text=text, runs=(self.tokens_per_tile,) * tiles)

    def _visual(self, tiles: int, *, marks: int, texts: tuple[str, ...] = ()) -> Visual:
        side = self.tile_pixels // self.patch_size
        return Visual(tokens=tiles * self.tokens_per_tile + marks, grid=(tiles, side, side), texts=texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaVision(_SquarePixels):
    """Gemma 3: each image as a square, and with pan and scan, crops of elongated images; no videos."""

    name: str = "gemma3"
    image_pixels: Count = 896
    patch_size: Count = 14
    tokens_per_image: Count = 256
    pan_and_scan: bool = False
    min_crop_pixels: Count = 256
    max_crops: Tiles = 4
    least_aspect: Positive = 1.2

    @property
    def template_marks(self) -> int:
        return 0  # <start_of_image> counts as part of the image

    @property
    def side(self) -> int:
        return self.image_pixels

    def image(self, height: int, width: int) -> Visual:
        crops = self._crops(min(height, width), max(height, width)) if self.pan_and_scan else 0
        images, side = 1 + crops, self.image_pixels // self.patch_size
        # Two line breaks and the start and end tokens surround each image; text separates them.
        texts = ("Here is the original image ", _CROPS_TEXT, *([" "] * (crops - 1))) if crops else ()
        return Visual(tokens=images * (self.tokens_per_image + 4), grid=(images, side, side), texts=texts)

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        raise ValueError("Gemma 3 takes no videos; give their frames as images")

    def marks(self, tokenizer: Any) -> Marks:
        start, pad, end = tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token
        return Marks(image=start, video=pad, image_pad=pad, video_pad=pad, start=start, end=end)

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        image = f"\n\n{marks.start}{marks.image_pad}{marks.end}\n\n"
        runs = (self.tokens_per_image,) * visual.grid[0]
        if not visual.texts:
            return Written(text=image, runs=runs)
        return Written(text="".join(f"{text}{image}" for text in visual.texts), runs=runs)

    def _crops(self, short: int, long: int) -> int:
        """Return the number of crops along the image's longer side."""
        if long / short < self.least_aspect:
            return 0
        wanted = min(long // self.min_crop_pixels, math.floor(long / short + 0.5))
        crops = min(self.max_crops, max(2, wanted))
        return 0 if min(math.ceil(long / crops), short) < self.min_crop_pixels else crops


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4Vision(_ImageRows):
    """Gemma 4: the image at its own aspect ratio, as large as the token limit allows, then padded; no videos."""

    name: str = "gemma4"
    patch_size: Count = 16
    pooling_size: Count = 3
    max_tokens: Count = 280

    @property
    def template_marks(self) -> int:
        return 0  # <|image> and <image|> count as part of the image

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.max_tokens * self.pooling_size**2, 3 * self.patch_size**2

    def image(self, height: int, width: int) -> Visual:
        side, most = self.pooling_size * self.patch_size, self.max_tokens
        scale = math.sqrt(most * side**2 / (height * width))
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if not rows and not columns:
            raise ValueError(f"{height} x {width} pixels are smaller than a token of {side} x {side} pixels")
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        grid = (1, rows * self.pooling_size, columns * self.pooling_size)
        return Visual(tokens=rows * columns + 2, grid=grid)

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        raise ValueError("videos of Gemma 4 cannot follow a plan; give their frames as images")

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        return visual.grid[1] * self.patch_size, visual.grid[2] * self.patch_size

    def marks(self, tokenizer: Any) -> Marks:
        pad: str = tokenizer.image_token
        start, end = tokenizer.boi_token, tokenizer.eoi_token
        return Marks(image=pad, video=pad, image_pad=pad, video_pad=pad, start=start, end=end)

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        return Written(text=f"{marks.start}{marks.image_pad}{marks.end}", runs=(visual.tokens - 2,))


_CROPS_TEXT: Final = " and here are some crops to help you see better "


@lru_cache(maxsize=1 << 16)
def _best_grid(height: int, width: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return (columns, rows) with the closest aspect ratio; on ties, more tiles if the image half fills them."""
    sides = range(1, max_tiles + 1)
    grids = sorted(
        ((c, r) for c in sides for r in sides if min_tiles <= c * r <= max_tiles), key=lambda grid: grid[0] * grid[1]
    )
    best, best_difference = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile * tile * columns * rows
        if difference < best_difference or (difference == best_difference and fills):
            best, best_difference = (columns, rows), difference
    return best
