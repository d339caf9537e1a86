"""Conversations about images and videos, encoded by a checkpoint's chat template and processor, trained with pixels.

Counting reads only picture headers. The manifest keeps the sizes in `pictures`, so that training lays out a row without
opening them; only the rank that encodes a picture reads its data.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.chat import PICTURE_FIELDS, ChatEncoder, Encoded, Pictured
from fcp_cli.manifest.columnar import DATA_SUFFIXES, TableRows, table_rows
from fcp_cli.manifest.media import HEADER_BYTES, IMAGE_SUFFIXES, VIDEO_SUFFIXES, image_size, video_size
from fcp_cli.manifest.records import place_of, record_at, records_of, tar_samples, units_of
from fcp_cli.manifest.sources import RowBatch, Source, grouped, names_below
from fcp_cli.manifest.table import LEARNED_COLUMN
from fcp_cli.manifest.text import json_record
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import cached_by_file, open_input
from fcp_cli.util.tar import TarMember, tar_content
from fcp_cli.util.words import counted
from fcp_cli.vision.processors import VisionProcessor, Visual

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
class PictureData(Source):
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


# Reads conversations about images and videos from JSON, JSON lines, Parquet, Arrow and WebDataset tars.
#
# A "picture" is an image or a video. A record names its pictures in `image`, `images`, `video` or `videos`, or in
# content parts of its turns. `<image>` and `<video>` in texts mark their positions; unmarked pictures come before the
# first question. A lone `caption` or `text` answers an empty question. In a WebDataset sample, image and video files
# are its pictures, `.txt` is the caption and `.json` holds further fields.

_BATCH_ROWS: Final = 64  # rows of a table may hold image data
_PLACES: Final = re.compile("(<image>|<video>)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A record and references to its pictures.

    Attributes:
        record: input of `manifest.tokenizing.chat`, with `{"type": "image"}` in place of each image.
        pictures: (picture, is video) in order of position.
        place: location for messages.
        at: where to read it again: byte offset of its line or sample, else its index in the file.
        done: source units read for it.
    """

    record: dict[str, Any]
    pictures: tuple[tuple[Picture, bool], ...]
    place: str
    at: int
    done: int = 0


def read_conversations(file: Path) -> Iterator[Conversation]:
    """Yield the records of a file, in order.

    Raises:
        ManifestError: the file cannot be read, or the pictures of a record do not match their marks.
    """
    if file.suffix == ".tar":
        for record, key, offset, done in tar_samples(file, 0, partial(_add_member, file)):
            yield _conversation(record, file, f"{file}: {key}", offset, done)
        return
    for found in records_of(file, batch_rows=_BATCH_ROWS):
        yield _conversation(found.record, file, found.place, found.at, found.done)


def conversation_at(file: Path, at: int, pictures: tuple[int, int]) -> Conversation:
    """Read a record again.

    Args:
        file: the file that holds it.
        at: see `Conversation.at`.
        pictures: number of images and of videos, so that a table's image data need not be read.

    Raises:
        ManifestError: the record is missing or has changed.
    """
    if file.suffix == ".tar":
        found = next(tar_samples(file, at, partial(_add_member, file)), None)
        if found is None:
            raise ManifestError(f"{file} at byte {at} is gone; build the manifest again")
        return _conversation(found[0], file, f"{file}: {found[1]}", at, 0)
    place = place_of(file, at)
    if file.suffix in DATA_SUFFIXES:
        record = _of_table(file, at, place, dict(zip(("image", "video"), pictures, strict=True)))
    else:
        record = record_at(file, at, place)
    return _conversation(record, file, place, at, 0)


def _of_table(file: Path, at: int, place: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return a table row with references to its pictures, without reading image data."""
    rows = table_rows(file)
    record = rows.record(at, [name for name in rows.columns if name not in PICTURE_FIELDS], place)
    for name in rows.columns:
        if name in PICTURE_FIELDS:
            numbers = range(counts[name.rstrip("s")])
            record[name] = [CellPicture(path=file, row=at, column=name, number=number) for number in numbers]
    return record


def _add_member(path: Path, sample: dict[str, Any], stream: IO[bytes], member: TarMember, suffix: str) -> None:
    last = "." + suffix.rpartition(".")[2]
    kind = "images" if last in IMAGE_SUFFIXES else "videos" if last in VIDEO_SUFFIXES else None
    if kind is not None:
        picture = TarPicture(path=path, member=member.name, byte_offset=member.offset_data, size_bytes=member.size)
        sample.setdefault(kind, []).append(picture)
    elif last in (".txt", ".json"):
        content = tar_content(path, stream, member, error=ManifestError)
        if last == ".txt":
            sample["caption"] = content.decode("utf-8", "replace")
        else:
            fields = json_record(content, f"{path}: {member.name}")
            sample.update({name: value for name, value in fields.items() if name not in PICTURE_FIELDS})
    else:
        sample.setdefault("other", True)


def _conversation(record: dict[str, Any], file: Path, place: str, at: int, done: int) -> Conversation:
    seen = _Seen(record, file.parent, place)
    changed = _as_turns({name: value for name, value in record.items() if name not in PICTURE_FIELDS}, place)
    for name in ("messages", "conversations", "prompt", "completion"):
        if isinstance(changed.get(name), list):
            changed[name] = [_with_parts(turn, seen) for turn in changed[name]]
    if not seen.taken:
        _put_first(changed, seen)
    seen.require_all()
    return Conversation(record=changed, pictures=tuple(seen.taken), place=place, at=at, done=done)


def _as_turns(record: dict[str, Any], place: str) -> dict[str, Any]:
    """Convert Alpaca and caption records to turns; return others unchanged."""
    if record.get("messages") is not None or record.get("conversations") is not None:
        return record
    if record.get("instruction") is not None and record.get("output") is not None:
        asked = "\n\n".join(str(record[name]) for name in ("instruction", "input") if record.get(name))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
        return {"messages": turns, **({"system": record["system"]} if record.get("system") else {})}
    caption = record.get("caption", record.get("text"))
    if caption is None or record.get("prompt") is not None:
        return record
    if not isinstance(caption, str):
        raise ManifestError(f"{place}: 'caption' or 'text' is {str(caption)[:40]!r}; it must be a text")
    return {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": caption}]}


class _Seen:
    """Hands out the pictures that a record's fields name, and collects those used, in order of position."""

    def __init__(self, record: Mapping[str, Any], folder: Path, place: str) -> None:
        self._folder = folder
        self._place = place
        self._named = {"image": _listed(record, "image"), "video": _listed(record, "video")}
        self._used = {"image": 0, "video": 0}
        self.taken: list[tuple[Picture, bool]] = []

    def left(self, kind: str) -> int:
        return len(self._named[kind]) - self._used[kind]

    def take(self, kind: str, own: Any = None) -> dict[str, Any]:
        """Use the next named picture of a kind, or `own` if the part names one; return the placeholder part."""
        if own is None:
            if not self.left(kind):
                named = counted(len(self._named[kind]), kind)
                raise ManifestError(f"{self._place} has more places for {kind}s than the {named} it names")
            own = self._named[kind][self._used[kind]]
            self._used[kind] += 1
        self.taken.append((refer(own, self._folder, self._place), kind == "video"))
        return {"type": kind}

    def has_any(self) -> bool:
        return any(map(len, self._named.values()))

    def require_all(self) -> None:
        for kind, named in self._named.items():
            if self.left(kind):
                raise ManifestError(
                    f"{self._place} names {counted(len(named), kind)} but has places for {self._used[kind]}; put "
                    f"<{kind}> into its texts for each"
                )


def _listed(record: Mapping[str, Any], kind: str) -> list[Any]:
    value: Any = next((record[name] for name in (kind, f"{kind}s") if record.get(name) is not None), [])
    return list(value) if isinstance(value, list | tuple) else [value]


def _with_parts(turn: Any, seen: _Seen) -> Any:
    """Return a turn; if it has pictures, its content is split into parts."""
    if not isinstance(turn, dict):
        return turn
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(content, str):
        parts = _split(content, seen)
    elif isinstance(content, list):
        parts = [_part(part, seen) for part in content]
    else:
        return turn
    if parts is None:
        return turn
    return {**{key: value for key, value in turn.items() if key not in ("content", "value")}, "content": parts}


def _split(text: str, seen: _Seen) -> list[dict[str, Any]] | None:
    if not seen.has_any() or not _PLACES.search(text):
        return None
    pieces = (piece for piece in _PLACES.split(text) if piece)
    return [seen.take(piece[1:-1]) if _PLACES.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces]


def _part(part: Any, seen: _Seen) -> Any:
    if not isinstance(part, dict):
        return part
    kind = str(part.get("type", "")).removesuffix("_url")
    if kind not in ("image", "video"):
        return {name: value for name, value in part.items() if value is not None}
    # In tables, fields that a part lacks are null.
    own = next((part[name] for name in (kind, f"{kind}_url", "path", "url") if part.get(name) is not None), None)
    return seen.take(kind, own)


def _put_first(record: dict[str, Any], seen: _Seen) -> None:
    """Insert unmarked pictures before the first question."""
    kinds = [kind for kind in ("image", "video") for _ in range(seen.left(kind))]
    if not kinds:
        return
    name = next((name for name in ("messages", "conversations", "prompt") if isinstance(record.get(name), list)), None)
    turns = record[name] if name else []
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("user", "human"):
            content = turn.get("content", turn.get("value"))
            rest = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
            kept = {key: value for key, value in turn.items() if key not in ("content", "value")}
            turns[index] = {**kept, "content": [*map(seen.take, kinds), *rest]}
            return


# References to image and video data: a file, a tar member, a table cell, or bytes in the record.
#
# A reference is small and is sent to the process that decodes; only there is the data read.

Content: TypeAlias = "Path | io.BytesIO"


class Picture(Protocol):
    """A reference to an image or video that has not been read."""

    @property
    def name(self) -> str:
        """The file that holds it, for messages."""

    def content(self, most_bytes: int = -1) -> Content:
        """Return its path or its bytes: all of them, or the first `most_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePicture:
    """An image or video file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def content(self, most_bytes: int = -1) -> Content:
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class TarPicture:
    """A picture in an uncompressed tar, located by byte offset."""

    path: Path
    member: str
    byte_offset: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{self.path}: {self.member}"

    def content(self, most_bytes: int = -1) -> Content:
        size = self.size_bytes if most_bytes < 0 else min(most_bytes, self.size_bytes)
        try:
            with open_input(self.path, seekable=True) as stream:
                stream.seek(self.byte_offset)
                return io.BytesIO(stream.read(size))
        except OSError as error:
            raise ManifestError(f"{self.name}: cannot read it: {error.strerror or error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CellPicture:
    """A picture in a table cell: bytes, `{"bytes", "path"}`, a path, or an item of a list of these."""

    path: Path
    row: int
    column: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.path}, row {self.row}, {self.column!r}"

    def content(self, most_bytes: int = -1) -> Content:
        value = _rows(self.path).record(self.row, (self.column,), self.name)[self.column]
        values = value if isinstance(value, list) else [value]
        if self.number >= len(values):
            raise ManifestError(f"{self.name} has {len(values)} images now; build the manifest again")
        return refer(values[self.number], self.path.parent, self.name).content(most_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPicture:
    """A picture whose bytes are in the record."""

    name: str
    data: bytes = field(repr=False)

    def content(self, most_bytes: int = -1) -> Content:
        return io.BytesIO(self.data)


def refer(value: Any, folder: Path, place: str) -> Picture:
    """Return a reference for a field value: a path, a data URL, bytes, `{"bytes", "path"}`, or a reference already.

    Args:
        value: field value.
        folder: base folder of relative paths.
        place: location of the record, for messages.
    """
    if isinstance(value, FilePicture | TarPicture | CellPicture | HeldPicture):
        return value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return HeldPicture(name=f"{place}: {value.get('path') or 'a picture'}", data=value["bytes"])
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return HeldPicture(name=f"{place}: a picture", data=value)
    if not isinstance(value, str):
        raise ManifestError(f"{place}: a picture is {str(value)[:40]!r}; it must be a path or bytes")
    if value.startswith("data:"):
        return HeldPicture(name=f"{place}: a picture", data=_from_data_url(value, place))
    if "://" in value and not value.startswith("file://"):
        raise ManifestError(f"{place}: {value[:80]} is not on this machine; download it and name the file")
    return FilePicture(path=folder / value.removeprefix("file://"))


def _from_data_url(url: str, place: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise binascii.Error("not base64")
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ManifestError(f"{place}: a picture has the data URL {url[:40]!r}, which is not valid base64") from error


# Keep only two groups: cells hold image data.
_rows = cached_by_file(partial(TableRows, kept_groups=2), maxsize=16)
