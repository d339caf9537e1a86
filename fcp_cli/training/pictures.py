"""Images and videos of a run: decoded in advance, only on the rank that encodes them, or made up of their sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.manifest.media import MediaRecords
from fcp_cli.manifest.pictures import PictureRecords, PictureRow
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.tokens import open_media, open_pictures
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import require_length
from fcp_cli.training.decoding import BadPictureError, PixelPool, Values, Wanted, usual_workers
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights import has_vision
from fcp_cli.util.arrays import IntArray
from fcp_cli.vision import gemma3, gemma4, internvl, qwen2_5_vl, qwen3_vl
from fcp_cli.vision.parts import Pixels, PixelsRead, VisualSequence
from fcp_cli.vision.processors import (
    Gemma4Vision,
    GemmaVision,
    InternVision,
    Qwen25Vision,
    QwenVision,
    VisionProcessor,
    Visual,
)


def open_visuals(settings: TrainSettings, config: Any) -> SyntheticVisuals | PictureVisuals | None:
    """Open the images and videos of a run's manifest, or return None.

    Args:
        settings: settings of the run.
        config: configuration of the full model.
    """
    if len(settings.manifest) != 1:
        return None
    (manifest,) = settings.manifest
    kept = RunPaths(run_dir=settings.run_dir).origin if settings.resume else None
    pictures = open_pictures(manifest, kept=kept)
    sizes = open_media(manifest) if pictures is None and has_vision(config) else None
    records = pictures or sizes
    if records is None:
        return None
    if not has_vision(config):
        raise RunError(
            f"{manifest} holds pictures, but the model {settings.model} has no vision encoder; train a "
            "vision-language model, or build a manifest of texts only"
        )
    _require_same_patches(records, config)
    lengths = read_manifest(manifest, length_column=settings.length_column).length_tokens
    if pictures is not None:
        _require_vocabulary(pictures, config)
        workers = settings.decode_workers
        if workers is None:
            workers = usual_workers(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        pool = PixelPool(pictures.folder, pictures.processor, workers=workers)
        return PictureVisuals(pictures, lengths, config, pool)
    if settings.weights is not None:
        raise RunError(
            f"{manifest} was built from sizes only, so the weights of {settings.weights} would be trained on "
            "synthetic pixels; build it from the images with 'fcp manifest build DATA --kind media --processor "
            f"{settings.weights}', or rehearse with --weights random"
        )
    assert sizes is not None
    return SyntheticVisuals(sizes, lengths, config, seed=settings.seed)


def _require_vocabulary(pictures: PictureRecords, config: Any) -> None:
    entries = config.get_text_config().vocab_size
    if pictures.vocab_size > entries:
        raise RunError(
            f"the tokens of {pictures.path} go up to {pictures.vocab_size - 1}, but the model's vocabulary has "
            f"{entries} entries; build the manifest again with --processor and the folder of the model's checkpoint"
        )


def _require_same_patches(records: MediaRecords | PictureRecords, config: Any) -> None:
    """Check that the model and the manifest use the same patches: token counts depend on them."""
    processor, vision = records.processor, config.vision_config
    qwen_families: dict[str, type[Any]] = {
        "qwen3_vl": QwenVision,
        "qwen3_vl_moe": QwenVision,
        "qwen3_5": QwenVision,
        "qwen3_5_moe": QwenVision,
        "qwen2_5_vl": Qwen25Vision,
    }
    counted: tuple[Any, ...]
    wanted: tuple[Any, ...]
    if isinstance(processor, QwenVision | Qwen25Vision) and type(processor) is qwen_families.get(config.model_type):
        counted = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        wanted = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    elif config.model_type == "internvl" and isinstance(processor, InternVision):
        counted = (processor.tile_pixels, processor.patch_size, processor.tokens_per_tile)
        wanted = (vision.image_size[0], vision.patch_size[0], config.image_seq_length)
    elif config.model_type == "gemma3" and isinstance(processor, GemmaVision):
        counted = (processor.image_pixels, processor.patch_size, processor.tokens_per_image)
        wanted = (vision.image_size, vision.patch_size, config.mm_tokens_per_image)
    elif config.model_type == "gemma4" and isinstance(processor, Gemma4Vision):
        counted = (processor.patch_size, processor.pooling_size)
        wanted = (vision.patch_size, vision.pooling_kernel_size)
    else:
        family = "qwen2.5-vl" if config.model_type == "qwen2_5_vl" else "qwen3-vl"
        family = config.model_type if config.model_type in (*FAMILIES_OF_ROWS, "gemma4") else family
        raise RunError(
            f"{records.path} was counted with the processor {records.processor.describe()['name']}, but the model is "
            f"of the family {family}; build the manifest again with --processor {family}"
        )
    if counted != wanted:
        raise RunError(
            f"{records.path} was counted for patches {counted}, but the model's are {wanted} (see its vision figures); "
            "build the manifest again with --processor and the folder of the model's checkpoint"
        )


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


# Only the content of a synthetic sequence is made up: token counts, visual tokens and patches are real. A row is
# equal on every rank and in every run; pixels are drawn only on the encoding rank.


class SyntheticVisuals:
    """A `Fetch` for a manifest built from media sizes.

    Args:
        records: media sizes.
        lengths: [rows] sequence lengths.
        config: configuration of the full model.
        seed: seed of text and pixels.
    """

    def __init__(self, records: MediaRecords, lengths: IntArray, config: Any, *, seed: int) -> None:
        self._records = records
        self._lengths = lengths
        self._config = config
        self._seed = seed
        _require_same_patches(records, config)

    def __call__(self, row: int) -> VisualSequence:
        images, videos = self._records(row)
        ids = self._ids(row, images, videos)
        labels = np.where(np.isin(ids, self._placeholders), IGNORED, ids)

        def pixels(is_video: bool | None) -> Pixels:
            key, shape = (row,) if is_video is None else (row, int(is_video)), self._records.processor.row_shape
            return lambda start, stop: self._noise((*key, start), (stop - start, *shape))

        return sequence_of_family(self._config, ids, labels, images=images, videos=videos, pixels=pixels)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    @property
    def _placeholders(self) -> list[int]:
        return [self._config.image_token_id, getattr(self._config, "video_token_id", self._config.image_token_id)]

    def _ids(self, row: int, images: tuple[Visual, ...], videos: tuple[Visual, ...]) -> IntArray:
        """Return [length] ids: random text interleaved with placeholders of each part, remaining text at the end."""
        image, video = self._placeholders
        parts = [(image, self._part_tokens(visual)) for visual in images for _ in range(visual.grid[0])]
        if self._config.model_type == "qwen2_5_vl":  # has no text between the frames of a video
            parts += [(video, visual.grid[0] * self._part_tokens(visual)) for visual in videos]
        else:
            parts += [(video, self._part_tokens(visual)) for visual in videos for _ in range(visual.grid[0])]
        text_tokens = int(self._lengths[row]) - sum(count for _, count in parts)
        generator = np.random.default_rng([self._seed, row])
        text = generator.integers(0, min(image, video), text_tokens, np.int64)
        gap = text_tokens // (len(parts) + 1)
        pieces = [
            np.concatenate((text[i * gap : (i + 1) * gap], np.full(count, placeholder)))
            for i, (placeholder, count) in enumerate(parts)
        ]
        return np.concatenate((*pieces, text[len(parts) * gap :]))

    def _part_tokens(self, visual: Visual) -> int:
        _, height, width = visual.grid
        if self._config.model_type in FAMILIES_OF_ROWS:
            is_internvl = self._config.model_type == "internvl"
            return int(self._config.image_seq_length if is_internvl else self._config.mm_tokens_per_image)
        vision = self._config.vision_config
        side = vision.pooling_kernel_size if self._config.model_type == "gemma4" else vision.spatial_merge_size
        return height * width // int(side) ** 2

    def _noise(self, key: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        generator = np.random.default_rng([self._seed, *key])
        return torch.from_numpy(generator.standard_normal(shape, np.float32))
