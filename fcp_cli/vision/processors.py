"""Open the vision processor of a checkpoint folder, of a manifest's record, or a published one by name."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import numpy as np
from msgspec import Meta

from fcp_cli.errors import ManifestError
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import kind_of, read_json
from fcp_cli.util.validation import Count, Positive, validated

# Visual tokens and encoder work of an image or video, and the interface of processors that count them.


@dataclass(frozen=True, kw_only=True, slots=True)
class Visual:
    """The tokens and patches that one image or video adds to a sequence.

    Attributes:
        tokens: number of tokens that replace the placeholder, including start and end tokens, without `texts`.
        grid: number of parts (frame pairs or tiles, within which attention stays), and patch height and width of each.
        texts: texts between the visual tokens, such as time stamps.
        part_seconds: time between parts of a video, if the model's positions depend on it.
    """

    tokens: int
    grid: tuple[int, int, int]
    texts: tuple[str, ...] = ()
    part_seconds: float | None = None

    @property
    def patches(self) -> int:
        """Number of patches for the vision encoder."""
        return math.prod(self.grid)

    @property
    def patch_pairs(self) -> int:
        """Sum of squared patches over the parts: proportional to the cost of attention within them."""
        parts, height, width = self.grid
        return parts * (height * width) ** 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """A checkpoint's placeholder texts for images and videos.

    Attributes:
        image, video: text that the chat template renders.
        image_pad, video_pad: text of a visual token.
        start, end: texts around the visual tokens of a part.
    """

    image: str
    video: str
    image_pad: str
    video_pad: str
    start: str
    end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Text that replaces an image or video in a conversation, with a placeholder per run of visual tokens.

    Attributes:
        text: replacement of the chat template's text.
        runs: number of visual tokens of each placeholder, in order.
    """

    text: str
    runs: tuple[int, ...]


class VisionProcessor(Protocol):
    """Converts image and video sizes to tokens as a model family does.

    Attributes:
        template_marks: tokens that the chat template puts around a picture, not counted in `Visual.tokens`.
        row_shape: shape of a row of the encoder's pixels: a patch or a tile.
        frames_per_part: video frames encoded together.
    """

    @property
    def template_marks(self) -> int: ...

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    @property
    def frames_per_part(self) -> int: ...

    def rows_per_part(self, visual: Visual) -> int:
        """Return the number of pixel rows per part."""

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        """Return the height and width to which video frames are resized."""

    def describe(self) -> dict[str, Any]:
        """Return all settings, for the manifest."""

    def image(self, height: int, width: int) -> Visual:
        """Return the visual tokens of an image, given its size in pixels."""

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        """Return the visual tokens of a video, given its size in pixels and its frame rate."""

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        """Return the indices of the sampled frames: [sampled]."""

    def marks(self, tokenizer: Any) -> Marks:
        """Return a checkpoint's placeholder texts, from the attributes of its tokenizer."""

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        """Return the text with which the processor replaces a picture."""


# Visual token counts of processors with one pixel row per image, tile or frame: InternVL, Gemma 3 and Gemma 4.
#
# Formulas follow transformers 5.24 (`got_ocr2`, `internvl`, `gemma3`, `gemma4`), and tests compare them with the
# library. Default sizes are those of published checkpoints.

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


# Visual token counts of the Qwen-VL processors, in closed form.
#
# Formulas follow transformers 5.23 (`qwen2_vl`, `qwen3_vl`), and tests compare them with the library. Default sizes
# are those of published checkpoints.
#
# H, W = height and width in pixels after resizing; f = pixels along a token's side (patch_size * merge_size).

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


def words_of(text: str) -> int:
    """Estimate the tokens of a short text between visual tokens: one per word, digit, punctuation mark and space.

    This is Qwen's pre-tokenizer rule with one token per word; only the model's tokenizer counts exactly.
    """
    return len(re.findall(r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\s", text))


def recorded_processor(settings: Mapping[str, Any]) -> VisionProcessor:
    """Return the processor for recorded `describe` settings."""
    family: type[QwenVision | Qwen25Vision | InternVision | GemmaVision | Gemma4Vision] = InternVision
    if "tokens_per_image" in settings:
        family = GemmaVision
    if "pooling_size" in settings:
        family = Gemma4Vision
    if "merge_size" in settings:
        family = Qwen25Vision if "frame_min_pixels" in settings else QwenVision
    return validated(dict(settings), family, where="the manifest's processor", error=ManifestError)


_PUBLISHED: Final[Mapping[str, VisionProcessor]] = {
    processor.name: processor
    for processor in (QwenVision(), Qwen25Vision(), InternVision(), GemmaVision(), Gemma4Vision())
}


def open_processor(name: str) -> VisionProcessor:
    """Return a published processor by name, or the processor of a checkpoint folder."""
    if name in _PUBLISHED:
        return _PUBLISHED[name]
    folder = Path(name)
    if not folder.is_dir():
        raise ManifestError(f"--processor {name} is none of {', '.join(_PUBLISHED)}, nor the folder of a checkpoint")
    images = _config(folder, "preprocessor_config.json", "image_processor")
    kind = str(images.get("image_processor_type", ""))
    if kind.startswith("Qwen2VLImageProcessor"):
        return _checked(_qwen(folder, images), str(folder))
    if kind.startswith("GotOcr2ImageProcessor"):
        return _checked(_intern(folder, images), str(folder))
    if kind.startswith("Gemma3ImageProcessor"):
        return _checked(_gemma(folder, images), str(folder))
    if kind.startswith("Gemma4ImageProcessor"):
        return _checked(_gemma4(folder, images), str(folder))
    raise ManifestError(
        f"{folder} has the image processor {kind or 'of no name'!r}; fcp knows Qwen-VL's, InternVL's, Gemma 3's and "
        "Gemma 4's"
    )


def _checked(processor: VisionProcessor, where: str) -> VisionProcessor:
    """Validate the settings of a processor read from a file."""
    kind: Any = type(processor)
    figures = {field.name: getattr(processor, field.name) for field in fields(kind)}
    return validated(figures, kind, where=where, error=ManifestError)  # type: ignore[no-any-return]


def _qwen(folder: Path, images: dict[str, Any]) -> VisionProcessor:
    # Published Qwen2.5-VL folders have a single file, which configures videos too.
    is_shared = str(images.get("processor_class", "")).startswith("Qwen2")
    is_shared &= not any(
        (folder / name).exists() for name in ("video_preprocessor_config.json", "processor_config.json")
    )
    # Qwen3-VL has a patch size of 16, its predecessors 14.
    if images.get("patch_size") == _QWEN3_PATCH and not _has_videos(folder):
        return _qwen3_images(folder, images)
    videos = images if is_shared else _config(folder, "video_preprocessor_config.json", "video_processor")
    if videos.get("cap_pixels_per_frame"):
        raise ManifestError(f"{folder} caps the pixels of each video frame, which fcp does not model yet")
    kind = "Qwen2VLVideoProcessor" if is_shared else str(videos.get("video_processor_type", ""))
    if kind.startswith("Qwen3VL"):
        return _qwen3(folder, images, videos)
    if kind.startswith("Qwen2VLVideoProcessor"):
        return _qwen2_5(folder, images, videos)
    raise ManifestError(
        f"{folder} has the video processor {kind or 'of no name'!r}; fcp knows Qwen3VLVideoProcessor and "
        "Qwen2VLVideoProcessor"
    )


_QWEN3_PATCH: Final = 16


def _has_videos(folder: Path) -> bool:
    """Return whether a checkpoint has a video processor configuration."""
    if (folder / "video_preprocessor_config.json").exists():
        return True
    return (folder / "processor_config.json").exists() and "video_processor" in _config(folder, "processor_config.json")


def _qwen3_images(folder: Path, images: dict[str, Any]) -> QwenImages:
    limits = _block(images, "size")
    return QwenImages(
        name=str(folder.resolve()),
        patch_size=images["patch_size"],
        merge_size=images["merge_size"],
        temporal_patch_size=images["temporal_patch_size"],
        image_min_pixels=limits["shortest_edge"],
        image_max_pixels=limits["longest_edge"],
    )


def _qwen3(folder: Path, images: dict[str, Any], videos: dict[str, Any]) -> QwenVision:
    return QwenVision(
        name=str(folder.resolve()),
        patch_size=images["patch_size"],
        merge_size=images["merge_size"],
        temporal_patch_size=videos["temporal_patch_size"],
        image_min_pixels=_block(images, "size")["shortest_edge"],
        image_max_pixels=_block(images, "size")["longest_edge"],
        video_min_pixels=_block(videos, "size")["shortest_edge"],
        video_max_pixels=_block(videos, "size")["longest_edge"],
        frames_per_second=videos.get("fps", 2),
        min_frames=videos.get("min_frames", 4),
        max_frames=videos.get("max_frames", 768),
    )


def _qwen2_5(folder: Path, images: dict[str, Any], videos: dict[str, Any]) -> Qwen25Vision:
    is_sampled = bool(videos.get("do_sample_frames", False))
    if is_sampled and videos.get("num_frames") is not None:
        raise ManifestError(f"{folder} takes num_frames of each video, which fcp does not support; set fps instead")
    (image_min, image_max), (frame_min, frame_max) = _pixel_limits(images), _pixel_limits(videos)
    return Qwen25Vision(
        name=str(folder.resolve()),
        patch_size=images["patch_size"],
        merge_size=images["merge_size"],
        temporal_patch_size=videos["temporal_patch_size"],
        image_min_pixels=image_min,
        image_max_pixels=image_max,
        frame_min_pixels=frame_min,
        frame_max_pixels=frame_max,
        frames_per_second=videos.get("fps") if is_sampled else None,
        min_frames=videos.get("min_frames", 4),
        max_frames=videos.get("max_frames", 768),
    )


def _pixel_limits(settings: dict[str, Any]) -> tuple[int, int]:
    """Return minimum and maximum pixels: from `min_pixels` and `max_pixels`, else from `size` in newer files."""
    pair = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    least, most = (_block(settings, "size")[new] if settings.get(old) is None else settings[old] for old, new in pair)
    return least, most


def _intern(folder: Path, images: dict[str, Any]) -> InternVision:
    model = _config(folder, "processor_config.json")
    return InternVision(
        name=str(folder.resolve()),
        tile_pixels=_block(images, "size")["height"],
        patch_size=_patch_of(folder, InternVision().patch_size),
        tokens_per_tile=model["image_seq_length"],
        min_tiles=images["min_patches"],
        max_tiles=images["max_patches"],  # the processor overrides the file's crop_to_patches
    )


def _gemma(folder: Path, images: dict[str, Any]) -> GemmaVision:
    usual = GemmaVision()
    model = _config(folder, "processor_config.json") if (folder / "processor_config.json").is_file() else {}
    given = {
        "min_crop_pixels": images.get("pan_and_scan_min_crop_size"),
        "max_crops": images.get("pan_and_scan_max_num_crops"),
        "least_aspect": images.get("pan_and_scan_min_ratio_to_activate"),
    }
    return replace(
        usual,
        name=str(folder.resolve()),
        image_pixels=_block(images, "size")["height"],
        patch_size=_patch_of(folder, usual.patch_size),
        tokens_per_image=model.get("image_seq_length", usual.tokens_per_image),
        pan_and_scan=bool(images.get("do_pan_and_scan")),
        **{name: value for name, value in given.items() if value is not None},
    )


def _gemma4(folder: Path, images: dict[str, Any]) -> Gemma4Vision:
    usual = Gemma4Vision()
    return Gemma4Vision(
        name=str(folder.resolve()),
        patch_size=images.get("patch_size", usual.patch_size),
        pooling_size=images.get("pooling_kernel_size", usual.pooling_size),
        max_tokens=images.get("max_soft_tokens", usual.max_tokens),
    )


def _patch_of(folder: Path, usual: int) -> int:
    """Return the encoder's patch size from config.json, or `usual` if there is none."""
    if not (folder / "config.json").is_file():
        return usual
    size = _block(_config(folder, "config.json"), "vision_config").get("patch_size", usual)
    return size[0] if isinstance(size, list) and size else size  # type: ignore[no-any-return]


class _Settings(dict[str, Any]):
    """A JSON object that raises ManifestError with the file name on a missing key."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        super().__init__({key: _Settings(file, v) if isinstance(v, dict) else v for key, v in values.items()})
        self._file = file

    def __missing__(self, key: str) -> Any:
        raise ManifestError(f"{self._file} has no {key!r}, which the number of visual tokens depends on")


def _block(settings: dict[str, Any], key: str) -> dict[str, Any]:
    block = settings[key]
    if not isinstance(block, dict):
        raise ManifestError(f"{getattr(settings, '_file', 'the processor')}: {key} is {kind_of(block)}, not a mapping")
    return block


def _config(folder: Path, name: str, section: str | None = None) -> dict[str, Any]:
    """Read a JSON file of a checkpoint, or its section of `processor_config.json` in newer checkpoints."""
    file = folder / name
    if section is not None and not file.exists() and (folder / "processor_config.json").exists():
        return _block(_config(folder, "processor_config.json"), section)
    values = read_json(file, error=ManifestError)
    return _Settings(file, values if isinstance(values, dict) else {})
