"""Conversations about images and videos, encoded by a checkpoint's chat template and processor, trained with pixels.

Counting reads only picture headers. The manifest keeps the sizes in `pictures`, so that training lays out a row without
opening them; only the rank that encodes a picture reads its data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch, grouped, names_below
from fcp_cli.manifest.sources.media.media_readers import HEADER_BYTES, image_size, video_size
from fcp_cli.manifest.sources.media.picture_records import Conversation, conversation_at, read_conversations
from fcp_cli.manifest.sources.media.picture_refs import Picture
from fcp_cli.manifest.sources.records import units_of
from fcp_cli.manifest.table.header import LEARNED_COLUMN
from fcp_cli.manifest.tokenizing.chat import ChatEncoder, Encoded, Pictured
from fcp_cli.vision.processor import VisionProcessor, Visual

PICTURES_COLUMN: Final = "pictures"
_BATCH_RECORDS: Final = 1 << 8
_BATCH_BYTES: Final = 8 << 20
_MOST_PATCH_PAIRS: Final = 1 << 50  # keeps sums over a record within 64 bits
_SIZE: Final = pa.struct([("frames", pa.int32()), ("height", pa.int32()), ("width", pa.int32()), ("fps", pa.float64())])


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSize:
    """Size of a picture in pixels; an image has no `frames`.

    Attributes:
        frames: number of frames in the container.
        fps: frames per second, if known.
    """

    height: int
    width: int
    frames: int | None = None
    fps: float | None = None

    def visual(self, processor: VisionProcessor) -> Visual:
        """Return the visual tokens that a processor makes of it; ValueError if the processor rejects it."""
        if self.frames is None:
            return processor.image(self.height, self.width)
        return processor.video(self.frames, self.height, self.width, self.fps)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureData:
    """Files of conversations about pictures.

    Attributes:
        path: the file, or the folder that holds `files`, absolute.
        files: the files, in row order.
        encoder: chat encoder with a processor.
        skips_bad: skip records with unreadable pictures instead of raising.
    """

    path: Path
    files: tuple[Path, ...]
    encoder: ChatEncoder
    skips_bad: bool = False

    @property
    def units(self) -> int | None:
        return sum(map(units_of, self.files))

    def describe(self) -> dict[str, Any]:
        assert self.encoder.processor is not None
        return {
            "kind": "media",
            "path": str(self.path),
            "files": names_below(self.path, self.files),
            "content": "pixels",
            "tokenizer": str(self.encoder.folder),
            "processor": self.encoder.processor.describe(),
            "train_on": self.encoder.train_on,
        }

    def batches(self) -> Iterator[RowBatch]:
        start = 0
        for shard, file in enumerate(self.files):
            found = ((one, one.done) for one in read_conversations(file))
            for group in grouped(found, most_items=_BATCH_RECORDS, most_bytes=_BATCH_BYTES):
                kept, sizes = self._readable(group)
                encoded = encode(self.encoder, kept, sizes)
                yield RowBatch(
                    rows=self._rows(kept, encoded, sizes, (shard, start)),
                    done=sum(one.done for one in group),
                    largest_token=max((int(one.tokens.max()) for one in encoded if len(one.tokens)), default=-1),
                    skipped={"unreadable": len(group) - len(kept)},
                )
                start += len(kept)

    def _readable(self, group: Sequence[Conversation]) -> tuple[list[Conversation], list[list[PictureSize]]]:
        """Return the records with readable pictures, and the sizes of these."""
        kept, sizes = [], []
        for one in group:
            try:
                own = [_size_of(picture, one.place, is_video=is_video) for picture, is_video in one.pictures]
            except ManifestError as error:
                if not self.skips_bad:
                    raise ManifestError(f"{error}; use --bad-rows skip to drop such records") from error
                continue
            kept.append(one)
            sizes.append(own)
        return kept, sizes

    def _rows(
        self,
        group: list[Conversation],
        encoded: list[Encoded],
        sizes: list[list[PictureSize]],
        at: tuple[int, int],
    ) -> Any:
        assert self.encoder.processor is not None
        shard, start = at
        visuals = [
            [_visual(size, self.encoder.processor, one.place) for size in own]
            for one, own in zip(group, sizes, strict=True)
        ]
        names = [str(one.record.get("id", start + number)) for number, one in enumerate(group)]
        kinds = [[size.frames is not None for size in own] for own in sizes]
        columns = {
            "id": pa.array(names, pa.string()),
            "length": pa.array([len(one.tokens) for one in encoded], pa.int64()),
            LEARNED_COLUMN: pa.array([one.learned_tokens for one in encoded], pa.int64()),
            "vision_patches": pa.array([sum(visual.patches for visual in own) for own in visuals], pa.int64()),
            "vision_patch_pairs": pa.array([sum(visual.patch_pairs for visual in own) for own in visuals], pa.int64()),
            "num_images": pa.array([len(own) - sum(own) for own in kinds], pa.int64()),
            "num_videos": pa.array([sum(own) for own in kinds], pa.int64()),
            "shard": pa.array([shard] * len(group), pa.int32()),
            "record": pa.array([one.at for one in group], pa.int64()),
            PICTURES_COLUMN: pa.array([[asdict(size) for size in own] for own in sizes], pa.list_(_SIZE)),
        }
        return pa.record_batch(columns)


def encode(
    encoder: ChatEncoder, group: Sequence[Conversation], sizes: Sequence[Sequence[PictureSize]]
) -> list[Encoded]:
    """Encode conversations, given the sizes of their pictures."""
    assert encoder.processor is not None
    pictures = [
        [Pictured(visual=_visual(size, encoder.processor, one.place), is_video=size.frames is not None) for size in own]
        for one, own in zip(group, sizes, strict=True)
    ]
    return encoder.many([one.record for one in group], [one.place for one in group], pictures)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureRow:
    """A training row: its tokens, and its pictures in token order."""

    encoded: Encoded
    pictures: tuple[Picture, ...]
    sizes: tuple[PictureSize, ...]
    visuals: tuple[Visual, ...]
    place: str


class PictureRecords:
    """Random access to conversations by manifest row. Thread-safe."""

    def __init__(self, source: PictureData, shards: IntArray, records: IntArray, sizes: Any, vocab_size: int) -> None:
        self._source = source
        self._shards = shards
        self._records = records
        self._sizes = sizes
        self._lock = threading.Lock()
        self.vocab_size = vocab_size

    @property
    def path(self) -> Path:
        """Location of the conversations."""
        return self._source.path

    @property
    def processor(self) -> VisionProcessor:
        """The processor with which lengths were counted."""
        assert self._source.encoder.processor is not None
        return self._source.encoder.processor

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint whose tokenizer and processor are used."""
        return self._source.encoder.folder

    def __call__(self, row: int) -> tuple[IntArray, IntArray]:
        """Return (tokens, labels) of a row."""
        encoded = self.read(row).encoded
        return encoded.tokens, encoded.labels

    def read(self, row: int) -> PictureRow:
        """Return a row without reading pixels."""
        sizes = tuple(PictureSize(**values) for values in self._sizes[row].as_py())
        videos = sum(size.frames is not None for size in sizes)
        file, at = self._source.files[self._shards[row]], int(self._records[row])
        with self._lock:  # the tokenizer is not thread-safe
            found = conversation_at(file, at, (len(sizes) - videos, videos))
            if [is_video for _, is_video in found.pictures] != [size.frames is not None for size in sizes]:
                raise ManifestError(
                    f"{found.place} has {len(found.pictures)} pictures, but the manifest counted {len(sizes)}: it "
                    "has changed; build the manifest again"
                )
            (encoded,) = encode(self._source.encoder, [found], [sizes])
        return PictureRow(
            encoded=encoded,
            pictures=tuple(picture for picture, _ in found.pictures),
            sizes=sizes,
            visuals=tuple(size.visual(self.processor) for size in sizes),
            place=found.place,
        )

    def place(self, row: int) -> str:
        file = self._source.files[self._shards[row]]
        return f"{file} at {self._records[row]}"


def _size_of(picture: Picture, place: str, *, is_video: bool) -> PictureSize:
    """Read a picture's size from its header."""
    name = f"{place}: {picture.name}"
    if is_video:
        size = video_size(picture.content(), name)
        fps = size.get("fps")
        whole = {key: int(size[key]) for key in ("height", "width", "frames")}
        return PictureSize(**whole, fps=None if fps is None else float(fps))
    return PictureSize(**image_size(picture.content(HEADER_BYTES), name))


def _visual(size: PictureSize, processor: VisionProcessor, place: str) -> Visual:
    try:
        found = size.visual(processor)
    except ValueError as error:
        raise ManifestError(f"{place}: {error}; drop the record") from error
    if found.patch_pairs > _MOST_PATCH_PAIRS:
        raise ManifestError(
            f"{place}: a picture of {found.patches:,} patches is more than any encoder takes; remove the record, or "
            "correct the sizes in the checkpoint's preprocessor_config.json"
        )
    return found
