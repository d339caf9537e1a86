"""Visual tokens and encoder work of a picture, and the interface of the processors that count them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from fcp_cli.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Visual:
    """The tokens and patches that one image or video adds to a sequence.

    Attributes:
        tokens: the tokens that the placeholder in the text is replaced by, but for `texts`; with the marks around them.
        grid: parts within which the encoder attends (frame pairs, tiles), and height and width of each in patches.
        texts: pieces of text put between the visual tokens, as time stamps.
        part_seconds: the time from one part of a video to the next, if the model's positions depend on it.
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
    """The placeholders of pictures in a checkpoint's own vocabulary.

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
    """A picture as it is written in a conversation, with one placeholder for each run of visual tokens.

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
        """Return the visual of one image of this size in pixels."""

    def video(self, frames: int, height: int, width: int, fps: float | None) -> Visual:
        """Return the visual of a video of so many frames of this size in pixels, at `fps` frames per second."""

    def frame_indices(self, frames: int, fps: float | None) -> IntArray:
        """Return [sampled] which frames of a video the model sees."""

    def marks(self, tokenizer: Any) -> Marks:
        """Return the special tokens of pictures, by their names in tokenizers of transformers."""

    def written(self, visual: Visual, marks: Marks, *, is_video: bool) -> Written:
        """Return how the processor writes a picture."""
