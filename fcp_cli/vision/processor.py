"""Visual tokens and encoder work of an image or video, and the interface of processors that count them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from fcp_cli.arrays import IntArray


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
