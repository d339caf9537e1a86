"""Visual tokens and encoder work of images and videos, in closed form, for processors of Qwen-VL, InternVL and Gemma 3.

The formulas are those of transformers 5.23 (`qwen2_vl`, `qwen3_vl`, `got_ocr2`, `internvl`, `gemma3` processors); the
tests compare them with the library's own functions. The sizes are those of published checkpoints; `open_processor`
reads them from the checkpoint's own files instead, which is safer.

H, W = height and width in pixels after resizing; f = pixels along a token's side (patch_size * merge_size).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import numpy as np
from msgspec import Meta

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.reading.documents import kind_of, read_json
from fcp_cli.validation import Count, Positive, validated

_MAX_ASPECT: Final = 200
_DEFAULT_FPS: Final = 24.0  # the Qwen3-VL processor's default for a video without a rate


Tiles = Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Visual:
    """The tokens and patches that one image or video adds to a sequence.

    Attributes:
        tokens: that the placeholder in the text is replaced by, but for `texts`; with the marks around them.
        grid: parts within which the encoder attends (frame pairs, tiles), and height and width of each in patches.
        texts: pieces of text put between the visual tokens, as time stamps.
        part_seconds: from one part of a video to the next, where the model's positions tell the time by it.
    """

    tokens: int
    grid: tuple[int, int, int]
    texts: tuple[str, ...] = ()
    part_seconds: float | None = None

    @property
    def patches(self) -> int:
        """The number of patches that the vision encoder runs."""
        return math.prod(self.grid)

    @property
    def patch_pairs(self) -> int:
        """Sum over the parts of patches squared, to which the cost of attention within them is proportional."""
        parts, height, width = self.grid
        return parts * (height * width) ** 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The pieces of text that stand for pictures in a checkpoint's own vocabulary.

    Attributes:
        image, video: text of the chat template for an image and a video.
        image_pad, video_pad: text of each of their visual tokens.
        start, end: text around the visual tokens of a part.
    """

    image: str
    video: str
    image_pad: str
    video_pad: str
    start: str
    end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A picture as it is written in a conversation, with one placeholder where a run of visual tokens stands.

    Attributes:
        text: replaces the chat template's text.
        runs: visual tokens of each placeholder in it, in order.
    """

    text: str
    runs: tuple[int, ...]


class VisionProcessor(Protocol):
    """A model family's way to turn pixels into tokens.

    Attributes:
        template_marks: tokens that the chat template puts around a picture and `Visual.tokens` does not count.
        row_shape: shape of one row of the pixels that the encoder takes: of a patch, or of a tile.
        frames_per_part: frames of a video that are encoded together.
    """

    @property
    def template_marks(self) -> int: ...

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    @property
    def frames_per_part(self) -> int: ...

    def rows_per_part(self, visual: Visual) -> int:
        """Return the rows of pixels that each part of a picture becomes."""

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        """Return height and width to which frames of a video are resized."""

    def describe(self) -> dict[str, Any]:
        """Return every setting, for the manifest."""

    def image(self, height: int, width: int) -> Visual:
        """Return the visual of one image of this size in pixels.

        Raises:
            ValueError: the processor would refuse it.
        """

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        """Return the visual of a video of so many frames of this size in pixels, at `fps` frames per second.

        Raises:
            ValueError: the processor would refuse it.
        """

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        """Return [sampled] which frames of a video the model sees."""

    def marks(self, tokenizer: Any) -> Marks:
        """Return the special tokens of pictures, by their names in tokenizers of transformers."""

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        """Return how the processor writes a picture."""


class _QwenPixels:
    """Base of the Qwen-VL processors: patches several frames deep, and their special tokens."""

    __slots__ = ()
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def template_marks(self) -> int:
        return 2  # <|vision_start|> and <|vision_end|>; those between the frames of a video are counted with them

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
    """Qwen3-VL: the whole picture at its own aspect ratio; a video as pairs of frames with time stamps."""

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
        """Pixels along a token's side."""
        return self.patch_size * self.merge_size

    def describe(self) -> dict[str, Any]:
        return asdict(self)

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
        # The library takes all sampled frames to scale down, but their rounded number to decide whether to.
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
        marks = 2 * len(texts)  # a start and an end mark around each part of a video
        return Visual(tokens=math.prod(grid) // self.merge_size**2 + marks, grid=grid, texts=texts)

    def _time_stamps(self, indices: IntArray, rate: float) -> list[float]:
        """Return the seconds at the middle of each group of frames; the last frame fills up the last group."""
        size = self.temporal_patch_size
        seconds = np.pad(indices, (0, -len(indices) % size), mode="edge") / rate
        return [float(stamp) for stamp in (seconds[::size] + seconds[size - 1 :: size]) / 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenImages(QwenVision):
    """Qwen3-VL of a checkpoint that says nothing of videos: images are counted, videos refused."""

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        raise ValueError(f"{self.name} has no video_preprocessor_config.json, which sets the size of videos; add it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen25Vision(_QwenPixels):
    """Qwen2.5-VL and Qwen2-VL: as Qwen3-VL, but each frame has its limits, and no time stamps stand between frames.

    Attributes:
        frames_per_second: that a video is sampled at; None takes all frames, as the published files have it.
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

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def image(self, height: int, width: int) -> Visual:
        return self._visual(1, height, width, (self.image_min_pixels, self.image_max_pixels))

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        rate, sampled = fps or _DEFAULT_FPS, len(self.frame_indices(frames, fps))
        # The last frame fills up the last group.
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
        # A range of floats in single precision, which may have one more by rounding.
        return (np.arange(math.ceil(frames / step)) * step).astype(np.float32).astype(np.int64)

    def _visual(self, parts: int, height: int, width: int, limits: tuple[int, int]) -> Visual:
        _check_aspect(height, width)
        fitted = _fitted(self.patch_size * self.merge_size, (1, 1), (height, width), limits)
        grid = parts, fitted[0] // self.patch_size, fitted[1] // self.patch_size
        return Visual(tokens=math.prod(grid) // self.merge_size**2, grid=grid)


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVision:
    """InternVL 2.5 and 3: square tiles in the grid that is closest in aspect ratio, and a thumbnail."""

    name: str = "internvl"
    tile_pixels: Count = 448
    patch_size: Count = 14
    tokens_per_tile: Count = 256
    min_tiles: Tiles = 1
    max_tiles: Tiles = 12

    @property
    def template_marks(self) -> int:
        return 1  # a line break; <img> and </img> are counted with the picture

    @property
    def row_shape(self) -> tuple[int, ...]:
        return 3, self.tile_pixels, self.tile_pixels

    @property
    def frames_per_part(self) -> int:
        return 1

    def rows_per_part(self, visual: Visual) -> int:
        return 1

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        return self.tile_pixels, self.tile_pixels

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def image(self, height: int, width: int) -> Visual:
        columns, rows = _best_grid(height, width, self.tile_pixels, self.min_tiles, self.max_tiles)
        tiles = columns * rows
        tiles += 1 if tiles > 1 else 0  # the thumbnail, of which a single tile needs none
        return self._visual(tiles, marks=2)

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        texts = tuple(("" if i == 0 else "\n") + f"Frame{i + 1}: " for i in range(frames))
        return self._visual(frames, marks=2 * frames, texts=texts)

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        return np.arange(frames)

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
class GemmaVision:
    """Gemma 3: every image as a square, and with pan and scan, crops of one that is long or tall; no videos."""

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
        return 0  # <start_of_image> is counted with the picture

    @property
    def row_shape(self) -> tuple[int, ...]:
        return 3, self.image_pixels, self.image_pixels

    @property
    def frames_per_part(self) -> int:
        return 1

    def rows_per_part(self, visual: Visual) -> int:
        return 1

    def frame_size(self, visual: Visual) -> tuple[int, int]:
        return self.image_pixels, self.image_pixels

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def image(self, height: int, width: int) -> Visual:
        crops = self._crops(min(height, width), max(height, width)) if self.pan_and_scan else 0
        images, side = 1 + crops, self.image_pixels // self.patch_size
        # Around each image two breaks and its start and end; between them, text.
        texts = ("Here is the original image ", _CROPS_TEXT, *([" "] * (crops - 1))) if crops else ()
        return Visual(tokens=images * (self.tokens_per_image + 4), grid=(images, side, side), texts=texts)

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        raise ValueError("Gemma 3 takes no videos; give their frames as images")

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        return np.arange(frames)

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
        """Return how many crops an image becomes, side by side along its longer side."""
        if long / short < self.least_aspect:
            return 0
        wanted = min(long // self.min_crop_pixels, math.floor(long / short + 0.5))
        crops = min(self.max_crops, max(2, wanted))
        return 0 if min(math.ceil(long / crops), short) < self.min_crop_pixels else crops


_CROPS_TEXT: Final = " and here are some crops to help you see better "


@lru_cache(maxsize=1 << 16)
def _best_grid(height: int, width: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return (columns, rows) closest in aspect ratio; of equals the one with more tiles that the picture half fills."""
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


def _fitted(f: int, frames: tuple[int, int], size: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    """Return H, W: multiples of f that keep the aspect ratio and all frames together within the limits.

    Args:
        f: pixels along a token's side.
        frames: that are fitted, and their number as rounded for the decision whether to.
        size: height and width in pixels.
        limits: least and most pixels.
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
        raise ValueError(f"{height} x {width} pixels are beyond the aspect ratio of {_MAX_ASPECT} that Qwen-VL takes")


def words_of(text: str) -> int:
    """Count tokens of a short text between visual tokens as Qwen's vocabulary splits it: words, digits, marks, spaces.

    This follows from the published pre-tokenizer rule and takes every word for one token; counting with the model's
    own tokenizer is exact.
    """
    return len(re.findall(r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\s", text))


def recorded_processor(settings: Mapping[str, Any]) -> VisionProcessor:
    """Return the processor whose `describe` gave these settings, as a manifest records them."""
    family: type[QwenVision | Qwen25Vision | InternVision | GemmaVision] = InternVision
    if "tokens_per_image" in settings:
        family = GemmaVision
    if "merge_size" in settings:
        family = Qwen25Vision if "frame_min_pixels" in settings else QwenVision
    return validated(dict(settings), family, where="the manifest's processor", error=ManifestError)


_PUBLISHED: Final[Mapping[str, VisionProcessor]] = {
    processor.name: processor for processor in (QwenVision(), Qwen25Vision(), InternVision(), GemmaVision())
}


def open_processor(name: str) -> VisionProcessor:
    """Return one of the published checkpoints' sizes by its name, or a checkpoint folder's with its own.

    Raises:
        ManifestError: neither, or a folder whose processor is of another family.
    """
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
    raise ManifestError(
        f"{folder} has the image processor {kind or 'of no name'!r}; fcp knows Qwen-VL's, InternVL's and Gemma 3's"
    )


def _checked(processor: VisionProcessor, where: str) -> VisionProcessor:
    """Check the figures of a processor that a file describes."""
    kind: Any = type(processor)
    figures = {field.name: getattr(processor, field.name) for field in fields(kind)}
    return validated(figures, kind, where=where, error=ManifestError)  # type: ignore[no-any-return]


def _qwen(folder: Path, images: dict[str, Any]) -> VisionProcessor:
    # Qwen2.5-VL's published folders have one file, which its video processor reads as well.
    is_shared = str(images.get("processor_class", "")).startswith("Qwen2")
    is_shared &= not any(
        (folder / name).exists() for name in ("video_preprocessor_config.json", "processor_config.json")
    )
    # Qwen3-VL's patches have 16 pixels, those of its predecessors 14.
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
    """Return whether a checkpoint says how it reads videos."""
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
        raise ManifestError(f"{folder} takes num_frames of each video, which fcp does not model; set fps in its place")
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
    """Return least and most pixels: older files name them, newer ones have them in `size`; names come first."""
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
        max_tiles=images["max_patches"],  # the processor sets crop_to_patches, whatever the file says
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


def _patch_of(folder: Path, usual: int) -> int:
    """Return the encoder's patch size, which only the model's own file has; where there is none, the published one."""
    if not (folder / "config.json").is_file():
        return usual
    size = _block(_config(folder, "config.json"), "vision_config").get("patch_size", usual)
    return size[0] if isinstance(size, list) and size else size  # type: ignore[no-any-return]


class _Settings(dict[str, Any]):
    """A JSON object whose missing keys are named with their file."""

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
    """Read a JSON file of a checkpoint, or its section of `processor_config.json`, where newer checkpoints have it."""
    file = folder / name
    if section is not None and not file.exists() and (folder / "processor_config.json").exists():
        return _block(_config(folder, "processor_config.json"), section)
    values = read_json(file, error=ManifestError)
    return _Settings(file, values if isinstance(values, dict) else {})
