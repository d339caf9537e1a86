"""Sizes of images and videos in JSON lines: one record is one sequence, and no pixel is read.

`{"id": "a", "text_tokens": 120, "images": [{"height": 720, "width": 1280}],
  "videos": [{"frames": 900, "height": 720, "width": 1280, "fps": 30}]}`

`text_tokens` counts the whole rendered conversation, with the marks of its template and without the placeholders of
images and videos (`<|image_pad|>`, `<|video_pad|>`, `<IMG_CONTEXT>`), which are what is replaced by visual tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch, grouped
from fcp_cli.manifest.sources.jsonl import json_lines, json_record, size_of
from fcp_cli.manifest.vision import VisionProcessor, Visual

_BATCH_LINES: Final = 16_384
_BATCH_BYTES: Final = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSizes:
    """Records of a `.jsonl` of sizes.

    Attributes:
        path: the file, absolute.
        processor: how the model's family turns pixels into tokens.
        count_text: tokens of the short texts that it puts between visual tokens.
        counted_by: where `count_text` comes from, for the manifest: a tokenizer file, or `rule`.
    """

    path: Path
    processor: VisionProcessor
    count_text: Callable[[str], int]
    counted_by: str

    @property
    def units(self) -> int | None:
        return size_of(self.path)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "media",
            "path": str(self.path),
            "content": "lengths",
            "tokenizer": None if self.counted_by == "rule" else self.counted_by,
            "processor": self.processor.describe(),
        }

    def batches(self) -> Iterator[RowBatch]:
        count = lru_cache(maxsize=1 << 16)(self.count_text)
        start = 0
        for lines in grouped(json_lines(self.path), most_items=_BATCH_LINES, most_bytes=_BATCH_BYTES):
            rows = [
                self._row(line, start + i, f"{self.path}:{number}", count) for i, (number, _, line) in enumerate(lines)
            ]
            yield RowBatch(
                rows=pa.RecordBatch.from_pylist(rows, schema=_SCHEMA), done=sum(len(line) for _, _, line in lines)
            )
            start += len(lines)

    def _row(self, line: bytes, row: int, place: str, count: Callable[[str], int]) -> dict[str, Any]:
        record = json_record(line, place)
        visuals = [self._visual(size, place) for kind in ("images", "videos") for size in _sizes(record, kind, place)]
        text_tokens = _whole(record, "text_tokens", place, least=0)
        inserted = sum(count(text) for visual in visuals for text in visual.texts)
        return {
            "id": str(record.get("id", row)),
            "length": text_tokens + inserted + sum(visual.tokens for visual in visuals),
            "text_tokens": text_tokens,
            "vision_patches": sum(visual.patches for visual in visuals),
            "vision_patch_pairs": sum(visual.patch_pairs for visual in visuals),
            "num_images": len(_sizes(record, "images", place)),
            "num_videos": len(_sizes(record, "videos", place)),
        }

    def _visual(self, size: dict[str, Any], place: str) -> Visual:
        height, width = (_whole(size, name, place, least=1) for name in ("height", "width"))
        try:
            if "frames" not in size:
                return self.processor.image(height, width)
            return self.processor.video(_whole(size, "frames", place, least=1), height, width, _rate(size, place))
        except ValueError as error:
            raise ManifestError(f"{place}: {error}; leave the record out") from error


_SCHEMA: Final = pa.schema(
    [("id", pa.string())]
    + [
        (name, pa.int64())
        for name in ("length", "text_tokens", "vision_patches", "vision_patch_pairs", "num_images", "num_videos")
    ]
)


def _sizes(record: dict[str, Any], kind: str, place: str) -> list[dict[str, Any]]:
    sizes = record.get(kind) or []
    if not isinstance(sizes, list) or not all(isinstance(size, dict) for size in sizes):
        raise ManifestError(f"{place}: {kind!r} must be a list of objects with height and width")
    if any(("frames" in size) != (kind == "videos") for size in sizes):
        raise ManifestError(f"{place}: every object of 'videos' needs 'frames', and none of 'images' has it")
    return sizes


def _whole(record: dict[str, Any], name: str, place: str, *, least: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = "missing" if name not in record else json.dumps(value)
        raise ManifestError(f"{place}: {name!r} is {shown}; it must be a whole number >= {least}")
    return value


def _rate(size: dict[str, Any], place: str) -> float | None:
    fps = size.get("fps")
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not fps > 0:
        raise ManifestError(f"{place}: 'fps' is {json.dumps(fps)}; it must be a number > 0")
    return float(fps)
