"""Open the vision processor of a checkpoint folder, of a manifest's record, or a published one by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import ManifestError
from fcp_cli.reading.documents import kind_of, read_json
from fcp_cli.validation import validated
from fcp_cli.vision.image_processors import Gemma4Vision, GemmaVision, InternVision
from fcp_cli.vision.processor import VisionProcessor
from fcp_cli.vision.qwen_processors import Qwen25Vision, QwenImages, QwenVision


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
