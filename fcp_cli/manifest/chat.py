"""Turns a record of chat data into tokens, and marks those that are learned.

A record is one of these; the first that fits is taken:

    input_ids + labels              tokens as they are; a label of -100 is not learned
    messages, or conversations      turns of {"role", "content"} or ShareGPT's {"from", "value"}; optional `tools`
    prompt + completion             two texts, or two lists of turns
    instruction + output            Alpaca, with an optional `input` and `system`

Turns are rendered by the chat template of the tokenizer, as `apply_chat_template` of transformers does. What the
assistant said reaches from the template's generation prompt to the mark that ends its turn, which is learned with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.words import first_line

TrainOn = Literal["all", "assistant", "completion"]
NOT_LEARNED: Final = -100

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
# Stands for a turn's content where the template's own text around it is looked for; no text holds private characters.
_STAND_IN: Final = "\ue000fcp\ue001"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One sequence: [tokens] int64 ids, and as labels the ids that are learned, else -100."""

    tokens: IntArray
    labels: IntArray

    @property
    def learned_tokens(self) -> int:
        """Count the labels that a model is trained on: the first token has nothing before it to be predicted from."""
        return int((self.labels[1:] != NOT_LEARNED).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    """A text with the spans [start, end) of characters that are learned."""

    text: str
    spans: Sequence[tuple[int, int]]


def is_chat(record: Mapping[str, Any]) -> bool:
    """Return whether a record is one of those above, by the names of its fields."""
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
    """The tokenizer of a checkpoint folder, with its chat template.

    Args:
        folder: with tokenizer.json, tokenizer_config.json and the chat template, as `save_pretrained` writes them.
        train_on: learn `all` tokens, those of every `assistant` turn, or those of the last turn (`completion`).

    Raises:
        ManifestError: transformers is missing, or the folder holds no tokenizer.
    """

    def __init__(self, folder: Path, train_on: TrainOn) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ManifestError("chat data needs the transformers library: pip install 'fcp-cli[hf]'") from error
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

    def __call__(self, record: Mapping[str, Any], place: str) -> Encoded:
        """Encode one record.

        Raises:
            ManifestError: it has none of the forms above, or the template fails on it; the message begins with `place`.
        """
        return self.many([record], [place])[0]

    def many(self, records: Sequence[Mapping[str, Any]], places: Sequence[str]) -> list[Encoded]:
        """Encode records, their texts in one batch; raises as a call does."""
        rendered = [
            _given_tokens(record, place) if _form(record) == "tokens" else self._render(record, place)
            for record, place in zip(records, places, strict=True)
        ]
        texts = [item.text for item in rendered if isinstance(item, _Rendered)]
        encodings = iter(self._encode(texts) if texts else ())
        return [self._marked(item, *next(encodings)) if isinstance(item, _Rendered) else item for item in rendered]

    def _encode(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        # The template writes special tokens itself.
        found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def _marked(self, rendered: _Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        tokens = np.asarray(ids, np.int64)
        starts = np.asarray([start for start, _ in offsets], np.int64)
        learned = np.zeros(len(tokens), np.bool_)
        for start, end in rendered.spans:
            learned |= (starts >= start) & (starts < end)
        return Encoded(tokens=tokens, labels=np.where(learned, tokens, NOT_LEARNED))

    def _render(self, record: Mapping[str, Any], place: str) -> _Rendered:
        form = _form(record)
        if form is None:
            raise ManifestError(
                f"{place} has none of messages, conversations, prompt + completion, instruction + output, input_ids + "
                f"labels; its fields are {', '.join(record)}"
            )
        if form == "completion" and isinstance(record["prompt"], str):
            prompt, completion = record["prompt"], _text(record["completion"], "completion", place)
            completion += self._tokenizer.eos_token or ""
            start = 0 if self.train_on == "all" else len(prompt)
            return _Rendered(text=prompt + completion, spans=((start, len(prompt) + len(completion)),))
        turns = _turns(record, form, place)
        tools = record.get("tools") or None
        text = self._template(turns, tools, place)
        if self.train_on == "all":
            return _Rendered(text=text, spans=((0, len(text)),))
        said = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if self.train_on == "completion" or form == "completion":
            said = said[-1:]
        return _Rendered(text=text, spans=[self._span(text, turns, tools, index, place) for index in said])

    def _span(self, text: str, turns: list[dict[str, Any]], tools: Any, index: int, place: str) -> tuple[int, int]:
        """Return the characters of what the assistant said in one turn."""
        before = self._template(turns[:index], tools, place, prompts=True) if index else ""
        until = self._template(turns[: index + 1], tools, place)
        if text.startswith(before) and text.startswith(until):
            return len(before), len(until.rstrip())
        # A template may show a turn otherwise once others follow, as those do that drop earlier thoughts: find what
        # stands around the turn's content instead.
        other = [*turns[:index], {**turns[index], "content": _STAND_IN}, *turns[index + 1 :]]
        around = self._template(other, tools, place)
        if _STAND_IN not in around:
            raise ManifestError(f"{place}: the chat template of {self.folder} leaves out turn {index + 1}")
        after = around[around.index(_STAND_IN) + len(_STAND_IN) :]
        start = len(before) if text.startswith(before) else around.index(_STAND_IN)
        end = len(text) - len(after)
        mark = next((token for token in self._tokenizer.all_special_tokens if after.startswith(token)), "")
        return start, end + len(mark)

    def _template(self, turns: list[dict[str, Any]], tools: Any, place: str, *, prompts: bool = False) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=prompts
            )
        except Exception as error:  # a template raises what it likes
            raise ManifestError(f"{place}: the chat template of {self.folder} fails: {first_line(error)}") from error
        return rendered


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


def _turns(record: Mapping[str, Any], form: str, place: str) -> list[dict[str, Any]]:
    """Return the turns of a record as a chat template takes them."""
    if form == "alpaca":
        asked = [_text(record[name], name, place) for name in ("instruction", "input") if record.get(name)]
        turns = [{"role": "user", "content": "\n\n".join(asked)}]
        turns += [{"role": "assistant", "content": _text(record["output"], "output", place)}]
    elif form == "completion":
        turns = [*_listed(record, "prompt", place), *_listed(record, "completion", place)]
    else:
        turns = _listed(record, form, place)
    if record.get("system") and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(record["system"], "system", place)})
    return turns


def _listed(record: Mapping[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    turns = record[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns) or not turns:
        raise ManifestError(f"{place}: {name!r} must be a list of turns with 'role' and 'content'")
    return [_turn(turn, name, place) for turn in turns]


def _turn(turn: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
    role = turn.get("role", turn.get("from"))
    if role not in _ROLES:
        raise ManifestError(f"{place}: a turn of {name!r} is of {role!r}; roles are {', '.join(sorted(_ROLES))}")
    found = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined(content, name, place)
    return {**found, "role": _ROLES[role], "content": "" if content is None else _text(content, name, place)}


def _joined(parts: list[Any], name: str, place: str) -> str:
    """Return the text of a content in parts; pictures among them are media."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ManifestError(
                f"{place}: a turn of {name!r} holds a part of type {kind!r}; chat data is text alone, and --kind media "
                "reads conversations about images and videos"
            )
    return "".join(_text(part.get("text"), name, place) for part in parts)


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"{place}: {name!r} holds {str(value)[:40]!r} where a text belongs")
    return value
