"""Images and videos of a run: real ones, or synthetic ones of recorded sizes with synthetic text.

Only the content of a synthetic sequence is made up: token counts, visual tokens and patches are real. A row is equal on
every rank and in every run; pixels are drawn only on the encoding rank.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources.media.media import MediaRecords
from fcp_cli.manifest.sources.media.pictures import PictureRecords
from fcp_cli.manifest.tokens import open_media, open_pictures
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runtime.loss.labels import IGNORED
from fcp_cli.training.pictures.pictures import FAMILIES_OF_ROWS, PictureVisuals, sequence_of_family
from fcp_cli.training.pictures.pixel_pool import PixelPool, usual_workers
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.weights.models import has_vision
from fcp_cli.vision.image_processors import Gemma4Vision, GemmaVision, InternVision
from fcp_cli.vision.parts import Pixels, VisualSequence
from fcp_cli.vision.processor import Visual
from fcp_cli.vision.qwen_processors import Qwen25Vision, QwenVision


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
