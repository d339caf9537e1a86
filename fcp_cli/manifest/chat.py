"""Chat data: records of conversations in JSON, JSON lines, Parquet or Arrow, encoded by a checkpoint's own template.

A record has one of these forms; the first match is used:

    input_ids + labels              tokens as they are; label -100 is not trained
    messages, or conversations      turns of {"role", "content"} or ShareGPT's {"from", "value"}; optional `tools`
    prompt + completion             two texts, or two lists of turns
    instruction + output            Alpaca, with an optional `input` and `system`

Turns are rendered by the tokenizer's chat template. An assistant turn starts after the generation prompt and includes
its end-of-turn token, which is trained too.

Turns with images or videos ("pictures") have content parts such as `{"type": "image"}`. The placeholder that the
template renders is expanded as the checkpoint's processor does; visual tokens are never trained.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.records import BATCH_RECORDS, SourceRecord, has_lines, place_of, record_at, records_of, units_of
from fcp_cli.manifest.sources import WHOLE, Part, RowBatch, Source, item_groups, names_below
from fcp_cli.manifest.table import LEARNED_COLUMN
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import is_compressed, read_json
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.validation import shown
from fcp_cli.util.words import counted, first_line
from fcp_cli.vision.processors import Marks, VisionProcessor, Visual

if TYPE_CHECKING:
    from fcp_cli.util.templates import RenderedChat, Renderer

_BATCH_BYTES: Final = 8 << 20
_PART_RECORDS: Final = 1 << 12
_PART_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData(Source):
    """Files of chat records.

    Attributes:
        path: the file, or the folder that holds `files`, absolute.
        files: the files in the order of their rows.
        part: the records that begin in this part of the units of all files; ids count from its first record.
    """

    is_divisible = True
    path: Path
    files: tuple[Path, ...]
    encoder: ChatEncoder
    part: Part = WHOLE

    @property
    def units(self) -> int | None:
        start, stop = self.part.span(sum(map(units_of, self.files)))
        return stop - start

    @property
    def parts(self) -> int:
        if any(file.suffix == ".json" for file in self.files):
            return 1
        size = _PART_BYTES if has_lines(self.files[0]) else _PART_RECORDS
        return -(-(self.units or 1) // size)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "chat",
            "path": str(self.path),
            "files": names_below(self.path, self.files),
            "tokenizer": str(self.encoder.folder),
            "train_on": self.encoder.train_on,
        }

    @property
    def is_streamed(self) -> bool:
        return any(not has_lines(file) or is_compressed(file) for file in self.files)

    def groups(self) -> Iterator[tuple[int, int, list[SourceRecord]]]:
        def read(file: int, start: int, stop: int) -> Iterator[tuple[SourceRecord, int]]:
            return ((found, found.done) for found in records_of(self.files[file], start, stop))

        sizes = [units_of(file) for file in self.files]
        return item_groups(self.part, sizes, read, most_items=BATCH_RECORDS, most_bytes=_BATCH_BYTES)

    def count(self, group: tuple[int, int, list[SourceRecord]]) -> RowBatch:
        shard, start, records = group
        encoded = self.encoder.many([found.record for found in records], [found.place for found in records])
        return RowBatch(
            rows=_rows(records, encoded, shard, start),
            done=sum(found.done for found in records),
            largest_token=max((int(one.tokens.max()) for one in encoded if len(one.tokens)), default=-1),
            counted_ids=len(records),
            places=[found.place for found in records],
        )


def _rows(group: list[SourceRecord], encoded: list[Encoded], shard: int, start: int) -> Any:
    columns = {
        "id": np.arange(start, start + len(group)),
        "length": np.array([len(one.tokens) for one in encoded], np.int64),
        LEARNED_COLUMN: np.array([one.learned_tokens for one in encoded], np.int64),
        "shard": np.full(len(group), shard, np.int32),
        "record": np.array([found.at for found in group], np.int64),
    }
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


class ChatTokens:
    """Random access to (tokens, labels) by manifest row."""

    def __init__(self, source: ChatData, shards: IntArray, records: IntArray, vocab_size: int) -> None:
        self._source = source
        self._shards = shards
        self._records = records
        self._lock = threading.Lock()
        self.vocab_size = vocab_size

    def __call__(self, row: int) -> tuple[IntArray, IntArray]:
        file, at = self._source.files[self._shards[row]], int(self._records[row])
        with self._lock:  # the tokenizer is not thread-safe
            encoded = self._source.encoder(record_at(file, at, self.place(row)), self.place(row))
        return encoded.tokens, encoded.labels

    def place(self, row: int) -> str:
        return place_of(self._source.files[self._shards[row]], int(self._records[row]))


TrainOn = Literal["all", "assistant", "completion"]
NOT_LEARNED: Final = -100
PICTURE_FIELDS: Final = ("image", "images", "video", "videos")
"""Record fields that name images and videos."""

_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Stand-in for a turn's content, to find the template text around it; texts do not use private characters.
_STAND_IN: Final = "\ue000fcp\ue001"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A sequence: [tokens] int64 ids, and labels, which are the ids of trained tokens and -100 elsewhere."""

    tokens: IntArray
    labels: IntArray

    @property
    def learned_tokens(self) -> int:
        """Number of trained labels; the first token is never predicted, so its label does not count."""
        return int((self.labels[1:] != NOT_LEARNED).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictured:
    """A picture of a conversation, in the order of its turns."""

    visual: Visual
    is_video: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    """A rendered text, the [start, end) character spans that are trained, and the visual tokens of each placeholder."""

    text: str
    spans: Sequence[tuple[int, int]]
    runs: Sequence[int] = ()


class _Turns(NamedTuple):
    """A conversation before rendering; `learned` has the indices of trained turns."""

    turns: list[dict[str, Any]]
    tools: Any
    place: str
    learned: list[int]


def is_chat(record: Mapping[str, Any]) -> bool:
    """Return whether the field names of a record match one of the forms of chat data."""
    return _form(record) is not None


def _form(record: Mapping[str, Any]) -> str | None:
    forms = {
        "tokens": ("input_ids", "labels"),
        "messages": ("messages",),
        "conversations": ("conversations",),
        "completion": ("prompt", "completion"),
        "alpaca": ("instruction", "output"),
    }
    return next((form for form, names in forms.items() if all(record.get(name) is not None for name in names)), None)


class ChatEncoder:
    """Encodes chat records with the tokenizer and chat template of a checkpoint folder.

    Args:
        folder: has tokenizer.json, tokenizer_config.json and the chat template, as `save_pretrained` writes them.
        train_on: train on `all` tokens, on every `assistant` turn, or on the last assistant turn (`completion`).
        processor: the checkpoint's processor for images and videos; None: text only.
    """

    def __init__(self, folder: Path, train_on: TrainOn, processor: VisionProcessor | None = None) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ManifestError(
                f"chat data needs the transformers library: {pip_install('hf', 'transformers')}"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:  # the library raises many kinds
            raise ManifestError(
                f"{folder} is not the folder of a checkpoint with a tokenizer: {first_line(error)}"
            ) from error
        self.folder = folder
        self.train_on = train_on
        self.processor = processor
        self._own_template = None if processor is None else _processor_template(folder)
        self._marks: Marks | None = None if processor is None else _marks_of(processor, self._tokenizer, folder)

    def __call__(self, record: Mapping[str, Any], place: str) -> Encoded:
        """Encode a record."""
        return self.many([record], [place])[0]

    def many(
        self,
        records: Sequence[Mapping[str, Any]],
        places: Sequence[str],
        pictures: Sequence[Sequence[Pictured]] | None = None,
    ) -> list[Encoded]:
        """Encode records, tokenizing all texts in one batch.

        Args:
            records: records in the forms of chat data.
            places: location of each record, for messages.
            pictures: pictures of each record.
        """
        rendered = self._render([self._read(record, place) for record, place in zip(records, places, strict=True)])
        if pictures is not None:
            rendered = [
                self._with_pictures(item, own, place) if isinstance(item, _Rendered) else item
                for item, own, place in zip(rendered, pictures, places, strict=True)
            ]
        texts = [item.text for item in rendered if isinstance(item, _Rendered)]
        encodings = iter(self._encode(texts) if texts else ())
        return [
            self._marked(item, *next(encodings), place) if isinstance(item, _Rendered) else item
            for item, place in zip(rendered, places, strict=True)
        ]

    def _with_pictures(self, rendered: _Rendered, pictures: Sequence[Pictured], place: str) -> _Rendered:
        """Expand the template's placeholder of each picture as the processor does."""
        assert self.processor is not None and self._marks is not None
        marks = self._marks
        pattern = "|".join(map(re.escape, sorted({marks.image, marks.video})))
        found = list(re.finditer(pattern, rendered.text))
        wanted = [marks.video if picture.is_video else marks.image for picture in pictures]
        if [match.group() for match in found] != wanted:
            raise ManifestError(
                f"{place} has {counted(len(pictures), 'picture')}, but the text that {self.folder}'s chat template "
                f"makes of it has {counted(len(found), 'mark')} for them ({marks.image}, {marks.video}); they must be "
                "as many, of the same kinds in the same order. Texts mark their places by <image> and <video>; the "
                "template writes the checkpoint's own marks"
            )
        pieces, runs, at = list[str](), list[int](), 0
        ends, shifts = [0], [0]
        for match, picture in zip(found, pictures, strict=True):
            written = self.processor.written(picture.visual, marks, is_video=picture.is_video)
            pieces += [rendered.text[at : match.start()], written.text]
            runs += written.runs
            at = match.end()
            ends.append(at)
            shifts.append(shifts[-1] + len(written.text) - len(match.group()))
        moved = np.asarray(rendered.spans, np.int64).reshape(-1, 2)
        moved = moved + np.asarray(shifts)[np.searchsorted(ends, moved, side="right") - 1]
        spans = [(int(start), int(end)) for start, end in moved]
        return _Rendered(text="".join((*pieces, rendered.text[at:])), spans=spans, runs=runs)

    def _encode(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        # The template writes special tokens itself.
        try:
            found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        except (TypeError, ValueError, OverflowError) as error:  # bad tokenizer settings, or texts with lone surrogates
            raise ManifestError(f"the tokenizer of {self.folder} cannot encode: {first_line(error)}") from error
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def _marked(self, rendered: _Rendered, ids: list[int], offsets: list[tuple[int, int]], place: str) -> Encoded:
        tokens = np.asarray(ids, np.int64)
        starts = np.asarray([start for start, _ in offsets], np.int64)
        learned = np.zeros(len(tokens), np.bool_)
        for start, end in rendered.spans:
            learned |= (starts >= start) & (starts < end)
        if rendered.runs:
            visual = np.isin(tokens, self._pads)
            if int(visual.sum()) != len(rendered.runs):
                raise ManifestError(
                    f"{place}: the tokenizer of {self.folder} makes {int(visual.sum())} tokens of "
                    f"{len(rendered.runs)} marks for visual tokens; give a checkpoint whose tokenizer has them"
                )
            repeats = np.ones(len(tokens), np.int64)
            repeats[visual] = rendered.runs
            tokens, learned = np.repeat(tokens, repeats), np.repeat(learned & ~visual, repeats)
        return Encoded(tokens=tokens, labels=np.where(learned, tokens, NOT_LEARNED))

    @cached_property
    def _pads(self) -> list[int]:
        """Ids of the visual pad tokens."""
        assert self._marks is not None
        return [self._tokenizer.convert_tokens_to_ids(pad) for pad in (self._marks.image_pad, self._marks.video_pad)]

    def _read(self, record: Mapping[str, Any], place: str) -> Encoded | _Rendered | _Turns:
        form = _form(record)
        if form is None:
            raise ManifestError(
                f"{place} has none of messages, conversations, prompt + completion, instruction + output, input_ids + "
                f"labels; its fields are {', '.join(record)}"
            )
        if form == "tokens":
            return _given_tokens(record, place)
        if form == "completion" and isinstance(record["prompt"], str):
            prompt, completion = record["prompt"], _text(record["completion"], "completion", place)
            completion += self._tokenizer.eos_token or ""
            start = 0 if self.train_on == "all" else len(prompt)
            return _Rendered(text=prompt + completion, spans=((start, len(prompt) + len(completion)),))
        if self.processor is None and any(record.get(name) for name in PICTURE_FIELDS):
            raise ManifestError(f"{place} has pictures; --kind media with --processor FOLDER reads them with the text")
        turns = _turns(record, form, place, with_pictures=self.processor is not None)
        learned = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if self.train_on == "completion" or form == "completion":
            learned = learned[-1:]
        return _Turns(turns, record.get("tools") or None, place, [] if self.train_on == "all" else learned)

    def _render(self, read: Sequence[Encoded | _Rendered | _Turns]) -> list[Encoded | _Rendered]:
        """Render the turns among `read`, and locate the trained spans."""
        waiting = [one for one in read if isinstance(one, _Turns)]
        # Where a turn is trained, the text before it with the generation prompt, and the text up to its end.
        cuts = [[cut for index in one.learned for cut in ((index, True), (index + 1, False))] for one in waiting]
        found = iter(self._templated(waiting, cuts))
        return [self._spanned(one, next(found)) if isinstance(one, _Turns) else one for one in read]

    def _spanned(self, one: _Turns, rendered: RenderedChat) -> _Rendered:
        text, ends = rendered
        if self.train_on == "all":
            return _Rendered(text=text, spans=((0, len(text)),))
        spans = []
        for index, before, until in zip(one.learned, ends[::2], ends[1::2], strict=True):
            if before is not None and until is not None:
                spans.append((before[0], until[1]))
            else:
                spans.append(self._span_around(one, index, text, None if before is None else before[0]))
        return _Rendered(text=text, spans=spans)

    def _span_around(self, one: _Turns, index: int, text: str, start: int | None) -> tuple[int, int]:
        """Locate the text around a turn's content: a template may render a turn differently once others follow.

        For example, it may drop earlier reasoning.
        """
        turns = [*one.turns[:index], {**one.turns[index], "content": _STAND_IN}, *one.turns[index + 1 :]]
        (around, _), *_ = self._templated([one._replace(turns=turns)])
        if _STAND_IN not in around:
            raise ManifestError(f"{one.place}: the chat template of {self.folder} drops turn {index + 1}")
        after = around[around.index(_STAND_IN) + len(_STAND_IN) :]
        end = len(text) - len(after)
        mark = next((token for token in self._tokenizer.all_special_tokens if after.startswith(token)), "")
        return around.index(_STAND_IN) if start is None else start, end + len(mark)

    def _templated(
        self, conversations: Sequence[_Turns], cuts: Sequence[Sequence[tuple[int, bool]]] | None = None
    ) -> list[RenderedChat]:
        """Render conversations with the checkpoint's chat template, as transformers' `apply_chat_template` does."""
        from fcp_cli.util.templates import ChatToRender, RenderingError

        if not conversations:
            return []
        if not (self._own_template or self._tokenizer.chat_template):
            raise ManifestError(
                f"{self.folder} has no chat template: neither chat_template.jinja nor a tokenizer_config.json with one"
                "; copy that of the model's instruct variant there, or give the folder of that variant"
            )
        batch = list[ChatToRender]()
        try:
            for one, own in zip(conversations, cuts or [()] * len(conversations), strict=True):
                values = {
                    **self._tokenizer.special_tokens_map,
                    "messages": [_with_thoughts(turn) for turn in one.turns],
                    "tools": one.tools,
                    "documents": None,
                    "add_generation_prompt": False,
                }
                template = self._tokenizer.get_chat_template(self._own_template, one.tools)
                batch.append(ChatToRender(template, values, own))
            return self._renderer.render(batch)
        except Exception as error:  # the tokenizer raises many kinds
            at = error.index if isinstance(error, RenderingError) else min(len(batch), len(conversations) - 1)
            raise ManifestError(
                f"{conversations[at].place}: the chat template of {self.folder} fails: {first_line(error)}"
            ) from error

    @cached_property
    def _renderer(self) -> Renderer:
        from fcp_cli.util.templates import Renderer

        return Renderer()


def _given_tokens(record: Mapping[str, Any], place: str) -> Encoded:
    try:
        tokens, labels = (np.asarray(record[name] or [], np.int64) for name in ("input_ids", "labels"))
    except (TypeError, ValueError, OverflowError):
        tokens = labels = np.empty((0, 0), np.int64)
    if tokens.ndim != 1 or labels.ndim != 1:
        raise ManifestError(f"{place}: input_ids and labels must be flat lists of whole numbers")
    if len(tokens) != len(labels):
        raise ManifestError(f"{place} has {len(tokens)} input_ids but {len(labels)} labels; give as many")
    return Encoded(tokens=tokens, labels=labels)


def _processor_template(folder: Path) -> str | None:
    """Return the template in an older checkpoint's chat_template.json, which differs from the tokenizer's, or None."""
    file = folder / "chat_template.json"
    if not file.is_file() or (folder / "chat_template.jinja").is_file():
        return None
    document = read_json(file, error=ManifestError)
    return document.get("chat_template") if isinstance(document, dict) else None


def _marks_of(processor: VisionProcessor, tokenizer: Any, folder: Path) -> Marks:
    try:
        return processor.marks(tokenizer)
    except AttributeError as error:
        raise ManifestError(
            f"the tokenizer of {folder} does not name its placeholders for images: {first_line(error)}"
        ) from error


def _turns(record: Mapping[str, Any], form: str, place: str, *, with_pictures: bool) -> list[dict[str, Any]]:
    """Return the turns of a record in the form that chat templates take."""
    if form == "alpaca":
        asked = [_text(record[name], name, place) for name in ("instruction", "input") if record.get(name)]
        turns = [{"role": "user", "content": "\n\n".join(asked)}]
        turns += [{"role": "assistant", "content": _text(record["output"], "output", place)}]
    elif form == "completion":
        turns = [*_listed(record, "prompt", place, with_pictures), *_listed(record, "completion", place, with_pictures)]
    else:
        turns = _listed(record, form, place, with_pictures)
    if record.get("system") and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(record["system"], "system", place)})
    return turns


def _listed(record: Mapping[str, Any], name: str, place: str, with_pictures: bool) -> list[dict[str, Any]]:
    turns = record[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns) or not turns:
        raise ManifestError(f"{place}: {name!r} must be a list of turns with 'role' and 'content'")
    return [_turn(turn, name, place, with_pictures) for turn in turns]


def _turn(turn: Mapping[str, Any], name: str, place: str, with_pictures: bool) -> dict[str, Any]:
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ManifestError(f"{place}: a turn of {name!r} is of {shown(role)}; roles are {', '.join(sorted(_ROLES))}")
    found = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    content = turn.get("content", turn.get("value"))
    if with_pictures and has_pictures(content):
        _joined([part for part in content if not _is_picture(part)], name, place, with_pictures)
        return {**found, "role": _ROLES[role], "content": content}
    if isinstance(content, list):
        content = _joined(content, name, place, with_pictures)
    return {**found, "role": _ROLES[role], "content": "" if content is None else _text(content, name, place)}


def has_pictures(content: Any) -> bool:
    """Return whether the content of a turn is a list of parts that includes a picture."""
    return isinstance(content, list) and any(map(_is_picture, content))


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "video", "image_url", "video_url")


def _joined(parts: list[Any], name: str, place: str, with_pictures: bool) -> str:
    """Join the text parts of a content; raise if it has other parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            way = "chat data is text alone, and --kind media reads conversations about images and videos"
            if with_pictures:
                way = 'known are text, image, image_url, video and video_url, as in {"type": "image", "image": PATH}'
            raise ManifestError(f"{place}: a turn of {name!r} holds a part of type {kind!r}; {way}")
    return "".join(_text(part.get("text"), name, place) for part in parts)


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"{place}: {name!r} holds {str(value)[:40]!r} instead of a text")
    return value


# Field names of a turn's reasoning; templates read the first, or the name that their model uses.
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")


def _with_thoughts(turn: Mapping[str, Any]) -> dict[str, Any]:
    present = {name: value for name, value in turn.items() if value is not None}
    thoughts = next((present[name] for name in _THOUGHTS if name in present), None)
    return present if thoughts is None else {"thinking": thoughts, **present, "reasoning_content": thoughts}
