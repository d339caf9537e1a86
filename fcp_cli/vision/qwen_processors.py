"""Visual token counts of the Qwen-VL processors, in closed form.

Formulas follow transformers 5.23 (`qwen2_vl`, `qwen3_vl`), and tests compare them with the library. Default sizes are
those of published checkpoints.

H, W = height and width in pixels after resizing; f = pixels along a token's side (patch_size * merge_size).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.validation import Count, Positive
from fcp_cli.vision.processor import Marks, Visual, Written

_MAX_ASPECT: Final = 200
_DEFAULT_FPS: Final = 24.0  # Qwen3-VL's default for videos without a frame rate


class _QwenPixels:
    """Base of the Qwen-VL processors: patches that span several frames, and special tokens."""

    __slots__ = ()
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    def describe(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @property
    def template_marks(self) -> int:
        return 2  # <|vision_start|> and <|vision_end|>; those between frames count as part of the video

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (3 * self.temporal_patch_size * self.patch_size**2,)

    @property
    def frames_per_part(self) -> int:
        return self.temporal_patch_size

    def rows_per_part(self, visual: Visual) -> int:
        return visual.grid[1] * visual.grid[2]

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        return visual.grid[1] * self.patch_size, visual.grid[2] * self.patch_size

    def marks(self, tokenizer: Any) -> Marks:
        image, video, start, end = (
            getattr(tokenizer, f"{name}_token", usual)
            for name, usual in (
                ("image", "<|image_pad|>"),
                ("video", "<|video_pad|>"),
                ("vision_start", "<|vision_start|>"),
                ("vision_end", "<|vision_end|>"),
            )
        )
        return Marks(image=image, video=video, image_pad=image, video_pad=video, start=start, end=end)

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        parts, height, width = visual.grid
        tokens = height * width // self.merge_size**2
        if not is_video:
            return Written(text=marks.image_pad, runs=(tokens,))
        if not visual.texts:
            return Written(text=marks.video_pad, runs=(parts * tokens,))
        text = "".join(f"{stamp}{marks.start}{marks.video_pad}{marks.end}" for stamp in visual.texts)
        return Written(text=text, runs=(tokens,) * parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenVision(_QwenPixels):
    """Qwen3-VL: an image at its own aspect ratio; a video as frame pairs with time stamps."""

    name: str = "qwen3-vl"
    patch_size: Count = 16
    merge_size: Count = 2
    temporal_patch_size: Count = 2
    image_min_pixels: Count = 65_536
    image_max_pixels: Count = 16_777_216
    video_min_pixels: Count = 4_096
    video_max_pixels: Count = 25_165_824
    frames_per_second: Positive = 2.0
    min_frames: Count = 4
    max_frames: Count = 768

    @property
    def factor(self) -> int:
        """Side of a token, in pixels."""
        return self.patch_size * self.merge_size

    def image(self, height: int, width: int) -> Visual:
        _check_aspect(height, width)
        limits = self.image_min_pixels, self.image_max_pixels
        return self._visual(1, *_fitted(self.factor, (1, 1), (height, width), limits))

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        indices = self.frame_indices(frames, fps)
        sampled = len(indices)
        if sampled < self.temporal_patch_size:
            raise ValueError(f"a video needs at least {self.temporal_patch_size} frames")
        if height < self.factor or width < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        _check_aspect(height, width)
        # The library scales down by the exact number of sampled frames, but decides with the rounded number.
        rounded = round(sampled / self.temporal_patch_size) * self.temporal_patch_size
        limits = self.video_min_pixels, self.video_max_pixels
        fitted = _fitted(self.factor, (sampled, rounded), (height, width), limits)
        stamps = self._time_stamps(indices, fps or _DEFAULT_FPS)
        return self._visual(len(stamps), *fitted, texts=tuple(f"<{seconds:.1f} seconds>" for seconds in stamps))

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        wanted = int(frames / (fps or _DEFAULT_FPS) * self.frames_per_second)
        sampled = min(max(wanted, self.min_frames), self.max_frames, frames)
        indices: IntArray = np.linspace(0, frames - 1, sampled).round().astype(np.int64)
        return indices

    def _visual(self, parts: int, height: int, width: int, *, texts: tuple[str, ...] = ()) -> Visual:
        grid = parts, height // self.patch_size, width // self.patch_size
        marks = 2 * len(texts)  # start and end token around each part of a video
        return Visual(tokens=math.prod(grid) // self.merge_size**2 + marks, grid=grid, texts=texts)

    def _time_stamps(self, indices: IntArray, rate: float) -> list[float]:
        """Return the mid-point in seconds of each frame group; the last frame pads the last group."""
        size = self.temporal_patch_size
        seconds = np.pad(indices, (0, -len(indices) % size), mode="edge") / rate
        return [float(stamp) for stamp in (seconds[::size] + seconds[size - 1 :: size]) / 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenImages(QwenVision):
    """A Qwen3-VL checkpoint without video settings: images are counted, videos rejected."""

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        raise ValueError(f"{self.name} has no video_preprocessor_config.json, which sets the size of videos; add it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen25Vision(_QwenPixels):
    """Qwen2.5-VL and Qwen2-VL: like Qwen3-VL, but with pixel limits per frame and without time stamps.

    Attributes:
        frames_per_second: sampling rate of videos; None uses all frames, as published checkpoints do.
    """

    name: str = "qwen2.5-vl"
    patch_size: Count = 14
    merge_size: Count = 2
    temporal_patch_size: Count = 2
    image_min_pixels: Count = 3_136
    image_max_pixels: Count = 12_845_056
    frame_min_pixels: Count = 100_352
    frame_max_pixels: Count = 602_112
    frames_per_second: Positive | None = 2.0
    min_frames: Count = 4
    max_frames: Count = 768

    def image(self, height: int, width: int) -> Visual:
        return self._visual(1, height, width, (self.image_min_pixels, self.image_max_pixels))

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        rate, sampled = fps or _DEFAULT_FPS, len(self.frame_indices(frames, fps))
        # The last frame pads the last group.
        visual = self._visual(
            -(-sampled // self.temporal_patch_size), height, width, (self.frame_min_pixels, self.frame_max_pixels)
        )
        return replace(visual, part_seconds=self.temporal_patch_size / (sampled / frames * rate))

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        if self.frames_per_second is None:
            return np.arange(frames)
        size = self.temporal_patch_size
        if frames < size:
            raise ValueError(f"a video needs at least {size} frames")
        most = min(self.max_frames, frames) // size * size
        wanted = frames / (fps or _DEFAULT_FPS) * self.frames_per_second
        wanted = math.floor(min(max(wanted, self.min_frames), most, frames) / size) * size
        step = frames / wanted
        # Like a float32 range, which rounding may extend by one.
        return (np.arange(math.ceil(frames / step)) * step).astype(np.float32).astype(np.int64)

    def _visual(self, parts: int, height: int, width: int, limits: tuple[int, int]) -> Visual:
        _check_aspect(height, width)
        fitted = _fitted(self.patch_size * self.merge_size, (1, 1), (height, width), limits)
        grid = parts, fitted[0] // self.patch_size, fitted[1] // self.patch_size
        return Visual(tokens=math.prod(grid) // self.merge_size**2, grid=grid)


def _fitted(f: int, frames: tuple[int, int], size: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    """Return H, W: multiples of f that keep the aspect ratio and put the pixels of all frames within the limits.

    Args:
        f: pixels along a token's side.
        frames: number of frames, and the rounded number that decides whether to scale.
        size: height and width in pixels.
        limits: minimum and maximum pixels.
    """
    (number, rounded_number), (height, width), (min_pixels, max_pixels) = frames, size, limits
    fitted = round(height / f) * f, round(width / f) * f
    pixels = rounded_number * fitted[0] * fitted[1]
    if pixels > max_pixels:
        shrink = math.sqrt(number * height * width / max_pixels)
        return max(f, math.floor(height / shrink / f) * f), max(f, math.floor(width / shrink / f) * f)
    if pixels < min_pixels:
        grow = math.sqrt(min_pixels / (number * height * width))
        return math.ceil(height * grow / f) * f, math.ceil(width * grow / f) * f
    return fitted


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ValueError(f"{height} x {width} pixels exceed Qwen-VL's maximum aspect ratio of {_MAX_ASPECT}")
