"""Are fcp's closed forms for images and videos what the processors themselves count and do?

    python -m benchmarks.visual_tokens --sizes 10000 --pictures 200

For each family it draws random sizes and compares tokens, patches, time stamps and frame titles with transformers' own
processors: with what they count for every size, and with what they make of blank pictures of some small sizes (the
number of tokens does not depend on what a picture shows).
Needs `pip install torchvision pillow` beside `.[hf]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fcp_cli.vision.processors import InternVision, QwenVision, Visual

_RATES = (1.0, 7.5, 23.976, 24.0, 25.0, 30.0, 60.0)
Counted = tuple[int, int, int, tuple[str, ...]]
"""Tokens, patches, sum over parts of patches squared, and texts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, default=10_000, help="random sizes per family and kind")
    parser.add_argument("--pictures", type=int, default=200, help="of them made and processed, blank")
    arguments = parser.parse_args()
    checks: dict[str, tuple[Callable[..., Visual], Callable[..., Counted], Callable[..., Counted] | None, Any]] = {
        "Qwen3-VL images": (QwenVision().image, Qwen().image, Qwen().image_from_pixels, image_sizes),
        "Qwen3-VL videos": (QwenVision().video, Qwen().video, Qwen().video_from_pixels, video_sizes),
        "InternVL images": (InternVision().image, Intern().image, Intern().image_from_pixels, image_sizes),
        "InternVL videos": (InternVision().video, Intern().video, None, video_sizes),
    }
    wrong = 0
    for name, (ours, counts, processes, sizes) in checks.items():
        for how, theirs, number, largest in (
            ("counted", counts, arguments.sizes, 5000),
            ("processed", processes, arguments.pictures, 400),
        ):
            if theirs is None:  # the processor is given the very frames: there is nothing to process
                continue
            draws = list(sizes(number, largest))
            differ = [size for size in draws if counted(ours(*size)) != theirs(*size)]
            wrong += len(differ)
            first = f", first {differ[0]}: {counted(ours(*differ[0]))} vs {theirs(*differ[0])}" if differ else ""
            print(f"{name}, {how}: {len(draws):,} sizes, {len(differ)} differ{first}")
    return 1 if wrong else 0


def counted(visual: Visual) -> Counted:
    return visual.tokens, visual.patches, visual.patch_pairs, visual.texts


def image_sizes(number: int, largest: int) -> Iterator[tuple[int, int]]:
    """(height, width), log-uniform, within the aspect ratio that Qwen3-VL takes."""
    draw = np.random.default_rng(0)
    while number:
        height, width = (int(side) for side in np.exp(draw.uniform(np.log(8), np.log(largest), 2)))
        if max(height, width) <= 200 * min(height, width):
            number -= 1
            yield height, width


def video_sizes(number: int, largest: int) -> Iterator[tuple[int, int, int, float]]:
    """(frames, height, width, frames per second)."""
    draw = np.random.default_rng(1)
    for height, width in image_sizes(number, largest):
        frames = int(np.exp(draw.uniform(np.log(2), np.log(largest * 4 if largest > 1000 else 120))))
        yield frames, height, width, float(draw.choice(_RATES))


class Qwen:
    """transformers' Qwen3-VL processors with the sizes of published checkpoints."""

    def __init__(self) -> None:
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        limits = QwenVision()
        self._images: Any = Qwen2VLImageProcessor(
            patch_size=16,
            merge_size=2,
            size={"shortest_edge": limits.image_min_pixels, "longest_edge": limits.image_max_pixels},
        )
        self._videos: Any = Qwen3VLVideoProcessor(
            size={"shortest_edge": limits.video_min_pixels, "longest_edge": limits.video_max_pixels},
            cap_pixels_per_frame=False,
        )
        self._text: Any = Qwen3VLProcessor

    def image(self, height: int, width: int) -> Counted:
        patches = self._images.get_number_of_image_patches(height, width)
        return patches // 4, patches, patches**2, ()

    def image_from_pixels(self, height: int, width: int) -> Counted:
        done = self._images(torch.zeros(3, height, width, dtype=torch.uint8), return_tensors="pt")
        (_, rows, columns) = done["image_grid_thw"][0].tolist()
        assert len(done["pixel_values"]) == rows * columns
        return rows * columns // 4, rows * columns, (rows * columns) ** 2, ()

    def video(self, frames: int, height: int, width: int, fps: float) -> Counted:
        metadata = SimpleNamespace(total_num_frames=frames, fps=fps)
        metadata.frames_indices = self._videos.sample_frames(metadata)
        patches = self._videos.get_num_of_video_patches(len(metadata.frames_indices), height, width)
        parts = -(-len(metadata.frames_indices) // 2)
        return self._from_text(parts, patches // parts, metadata)

    def video_from_pixels(self, frames: int, height: int, width: int, fps: float) -> Counted:
        from transformers.video_utils import VideoMetadata

        done = self._videos(
            torch.zeros(frames, 3, height, width, dtype=torch.uint8),
            video_metadata=VideoMetadata(total_num_frames=frames, fps=fps),
            return_metadata=True,
            return_tensors="pt",
        )
        (parts, rows, columns) = done["video_grid_thw"][0].tolist()
        assert len(done["pixel_values_videos"]) == parts * rows * columns
        return self._from_text(parts, rows * columns, done["video_metadata"][0])

    def _from_text(self, parts: int, part_patches: int, metadata: Any) -> Counted:
        """Let the processor write the text that stands for the video, and read it."""
        processor = SimpleNamespace(
            video_processor=self._videos, vision_start_token="[", video_token="x", vision_end_token="]"
        )
        processor._calculate_timestamps = lambda *given: self._text._calculate_timestamps(processor, *given)
        grid = torch.tensor([[parts, 2, part_patches // 2]])
        inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
        written = self._text.replace_video_token(processor, inputs, 0)
        texts = tuple(piece.rpartition("]")[2] for piece in written.split("[")[:-1])
        tokens = sum(written.count(mark) for mark in "[x]")
        return tokens, parts * part_patches, parts * part_patches**2, texts


class Intern:
    """transformers' InternVL processors with the tiles of published checkpoints."""

    def __init__(self) -> None:
        from transformers import GotOcr2ImageProcessor, InternVLProcessor

        self._images: Any = GotOcr2ImageProcessor(
            size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12
        )
        self._text: Any = InternVLProcessor

    def image(self, height: int, width: int) -> Counted:
        return self._from_text("image", int(self._images.get_number_of_image_patches(height, width)))

    def image_from_pixels(self, height: int, width: int) -> Counted:
        done = self._images(torch.zeros(3, height, width, dtype=torch.uint8), return_tensors="pt")
        return self._from_text("image", len(done["pixel_values"]))

    def video(self, frames: int, height: int, width: int, fps: float) -> Counted:
        return self._from_text("video", frames)

    def _from_text(self, kind: str, tiles: int) -> Counted:
        processor = SimpleNamespace(start_image_token="[", image_token="x", end_image_token="]", image_seq_length=256)
        if kind == "image":
            written = self._text.replace_image_token(processor, {"num_patches": [tiles]}, 0)
            texts: tuple[str, ...] = ()
        else:
            written = self._text.replace_video_token(processor, {"pixel_values_videos": [torch.empty(tiles, 0)]}, 0)
            texts = tuple(piece.rpartition("]")[2] for piece in written.split("[")[:-1])
        tokens = sum(written.count(mark) for mark in "[x]")
        return tokens, tiles * 1024, tiles * 1024**2, texts


if __name__ == "__main__":
    sys.exit(main())
