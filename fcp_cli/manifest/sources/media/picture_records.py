"""Reads conversations about images and videos from JSON, JSON lines, Parquet, Arrow and WebDataset tars.

A "picture" is an image or a video. A record names its pictures in `image`, `images`, `video` or `videos`, or in content
parts of its turns. `<image>` and `<video>` in texts mark their positions; unmarked pictures come before the first
question. A lone `caption` or `text` answers an empty question. In a WebDataset sample, image and video files are its
pictures, `.txt` is the caption and `.json` holds further fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.jsonl import json_record
from fcp_cli.manifest.sources.media.media_readers import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from fcp_cli.manifest.sources.media.picture_refs import CellPicture, Picture, TarPicture, refer
from fcp_cli.manifest.sources.records import place_of, record_at, records_of, tar_samples
from fcp_cli.manifest.sources.shards import DATA_SUFFIXES, table_rows
from fcp_cli.manifest.tokenizing.chat import PICTURE_FIELDS
from fcp_cli.reading.tar import TarMember, tar_content
from fcp_cli.words import counted

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
