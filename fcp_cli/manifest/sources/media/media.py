"""Sizes of images and videos, without reading pixels; each record is a sequence.

`{"id": "a", "text_tokens": 120, "images": [{"height": 720, "width": 1280}],
  "videos": [{"frames": 900, "height": 720, "width": 1280, "fps": 30}]}`

`text_tokens` counts the rendered conversation, including template tokens but without the placeholders of images and
videos (`<|image_pad|>`, `<|video_pad|>`, `<IMG_CONTEXT>`), which visual tokens replace. Instead, a record may have
`conversations` (as in LLaVA: a list of `{"from", "value"}`), `caption` or `text`, which are tokenized; the tokens of a
ChatML template are then added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch, grouped
from fcp_cli.manifest.sources.jsonl import json_record, line_at
from fcp_cli.manifest.sources.line_place import LinePlace
from fcp_cli.manifest.sources.media.media_readers import TEXT_COLUMNS, media_units, read_media
from fcp_cli.manifest.sources.records import SourceRecord
from fcp_cli.manifest.table.checks import LONGEST_TOKENS
from fcp_cli.validation import shown
from fcp_cli.vision.processor import VisionProcessor, Visual

_BATCH_RECORDS: Final = 16_384
_BATCH_BYTES: Final = 32 << 20
_TURN_MARKS: Final = 4  # <|im_start|>, role, <|im_end|>, line break; the line break before a text is counted with it
_PLACEHOLDERS: Final = ("<image>", "<video>")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSizes:
    """Source of image and video sizes: JSON lines, a table, LLaVA-style JSON or a WebDataset.

    Attributes:
        path: the file, or the folder that holds `files`, absolute.
        files: the files, in row order.
        processor: computes tokens and patches from a size, for the model family.
        count_text: counts the tokens of a text.
        counted_by: recorded origin of `count_text`: a tokenizer file, or `rule`.
    """

    path: Path
    files: tuple[Path, ...]
    processor: VisionProcessor
    count_text: Callable[[str], int]
    counted_by: str

    @property
    def units(self) -> int | None:
        return media_units(self.files)

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
        found = ((one, one.done) for file in self.files for one in read_media(file))
        start = 0
        for group in grouped(found, most_items=_BATCH_RECORDS, most_bytes=_BATCH_BYTES):
            rows = [self._row(one, start + i, count) for i, one in enumerate(group)]
            yield RowBatch(rows=pa.RecordBatch.from_pylist(rows, schema=_SCHEMA), done=sum(one.done for one in group))
            start += len(group)

    def _row(self, found: SourceRecord, row: int, count: Callable[[str], int]) -> dict[str, Any]:
        record, place = found.record, found.place
        images, videos = visuals_of(record, self.processor, place)
        visuals = (*images, *videos)
        text_tokens = self._text_tokens(record, len(visuals), place)
        inserted = sum(count(text) for visual in visuals for text in visual.texts)
        sums = {
            "length": text_tokens + inserted + sum(visual.tokens for visual in visuals),
            "text_tokens": text_tokens,
            "vision_patches": sum(visual.patches for visual in visuals),
            "vision_patch_pairs": sum(visual.patch_pairs for visual in visuals),
        }
        for name, value in sums.items():
            if value >= 2**63:
                raise ManifestError(f"{place}: its {name} is {value:.3g}; are the figures of the processor right?")
        return {
            "id": str(record.get("id", row)).encode("utf-8", "replace").decode(),  # JSON may hold lone surrogates
            **sums,
            "num_images": len(images),
            "num_videos": len(videos),
            "byte_offset": found.at,
        }

    def _text_tokens(self, record: dict[str, Any], visuals: int, place: str) -> int:
        """Return the record's `text_tokens`, or count its texts with ChatML tokens and image marks."""
        if "text_tokens" in record or not any(name in record for name in TEXT_COLUMNS):
            return _whole(record, "text_tokens", place, least=0)
        turns = _turns(record, place)
        if self.counted_by == "rule":
            raise ManifestError(f"{place}: texts are counted by a tokenizer; give its file with --tokenizer FILE")
        # Tokenizers merge a line break with following white space, but never merge text across an image.
        pieces = (piece for turn in turns for piece in _pieces(f"\n{turn}"))
        text_tokens = sum(map(self.count_text, pieces)) + _TURN_MARKS * len(turns)
        return text_tokens + self.processor.template_marks * visuals


class MediaRecords:
    """Images and videos of each manifest row built from sizes, read again by byte offset. Thread-safe."""

    def __init__(self, path: Path, processor: VisionProcessor, byte_offsets: IntArray) -> None:
        self.path = path
        self.processor = processor
        self._byte_offsets = byte_offsets

    def __call__(self, row: int) -> tuple[tuple[Visual, ...], tuple[Visual, ...]]:
        """Return (images, videos) of one row."""
        place = LinePlace(self.path, int(self._byte_offsets[row]))
        return visuals_of(json_record(line_at(self.path, place.byte_offset), place), self.processor, place)


def _turns(record: dict[str, Any], place: str) -> list[str]:
    """Return the texts of a conversation with placeholders; a lone caption answers an empty question."""
    if "conversations" not in record:
        caption = record["caption"] if "caption" in record else record["text"]
        if not isinstance(caption, str):
            raise ManifestError(f"{place}: 'caption' or 'text' is {shown(caption)}; it must be a text")
        return ["", caption]
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns):
        raise ManifestError(f"{place}: 'conversations' must be a list of objects with a text under 'value'")
    return [str(turn["value"]) for turn in turns]


def _pieces(text: str) -> list[str]:
    """Split a text at its image and video placeholders."""
    for placeholder in _PLACEHOLDERS[1:]:
        text = text.replace(placeholder, _PLACEHOLDERS[0])
    return [piece for piece in text.split(_PLACEHOLDERS[0]) if piece]


def visuals_of(
    record: dict[str, Any], processor: VisionProcessor, place: str
) -> tuple[tuple[Visual, ...], tuple[Visual, ...]]:
    """Return (images, videos) of a record of sizes."""
    images, videos = (
        tuple(_visual(size, processor, place) for size in _sizes(record, kind, place)) for kind in ("images", "videos")
    )
    return images, videos


def _visual(size: dict[str, Any], processor: VisionProcessor, place: str) -> Visual:
    height, width = (_whole(size, name, place, least=1) for name in ("height", "width"))
    try:
        if "frames" not in size:
            return processor.image(height, width)
        return processor.video(_whole(size, "frames", place, least=1), height, width, _rate(size, place))
    except ValueError as error:
        raise ManifestError(f"{place}: {error}; drop the record") from error


_MOST_RATE: Final = 1e6
_MOST_FRAMES: Final = 1_000_000
_SCHEMA: Final = pa.schema(
    [("id", pa.string())]
    + [
        (name, pa.int64())
        for name in (
            "length",
            "text_tokens",
            "vision_patches",
            "vision_patch_pairs",
            "num_images",
            "num_videos",
            "byte_offset",
        )
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
    most = _MOST_FRAMES if name == "frames" else LONGEST_TOKENS
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        no_larger = f" and at most {most}" if isinstance(value, int) and value > most else ""
        found = "missing" if name not in record else shown(value)
        raise ManifestError(f"{place}: {name!r} is {found}; it must be a whole number >= {least}{no_larger}")
    return value


def _rate(size: dict[str, Any], place: str) -> float | None:
    fps = size.get("fps")
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= _MOST_RATE:
        raise ManifestError(f"{place}: 'fps' is {shown(fps)}; it must be a number > 0")
    return float(fps)
