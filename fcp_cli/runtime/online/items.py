"""Items of a stream: sequences as ids and lengths, or as rows with their tokens, read in whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, MaskedSequence
from fcp_cli.plan.metadata.batching import cut_by_count, cut_by_tokens
from fcp_cli.plan.metadata.online import OnlineSettings
from fcp_cli.vision.parts import VisualSequence

_FACTORS = {"eta": np.float64, "vision_patches": np.int64, "vision_patch_pairs": np.int64}


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of a stream.

    Attributes:
        length: number of tokens.
        given: its id, which `fetch` takes, or its row.
        is_row: whether `given` is a row.
        factors: work factors besides the length, by manifest column.
    """

    length: int
    given: Any
    is_row: bool
    factors: Mapping[str, float]


def item_of(given: Any, number: int) -> Item:
    """Parse item `number` of a stream."""
    if _is_id_with_length(given):
        given = {"id": given[0], "length": given[1]}
    if isinstance(given, Mapping) and "length" in given and "input_ids" not in given:
        if not isinstance(given.get("id"), (int, str)) or not _is_whole(given["length"]):
            raise RunError(
                f"sequence {number} of the stream has the id {given.get('id')!r} and the length {given['length']!r}; "
                "an id is a number or a text, a length a number of tokens"
            )
        factors = {name: given[name] for name in _FACTORS if given.get(name) is not None}
        return Item(int(given["length"]), given["id"], False, factors)
    tokens: Any = given.get("input_ids") if isinstance(given, Mapping) else getattr(given, "tokens", given)
    if isinstance(given, tuple) and len(given) == 2:
        tokens = given[0]
    mask = given.mask if isinstance(given, (MaskedSequence, VisualSequence)) else CAUSAL
    try:
        length = len(tokens)
        return Item(length, given, True, {} if mask.is_causal else {"eta": mask.eta(length)})
    except TypeError:
        raise RunError(
            f"sequence {number} of the stream is {_shown(given)}; a stream gives (id, length), or rows with input_ids"
        ) from None


def row_of(given: Any) -> Any:
    """Return the loader's item of a row: its tokens, or (tokens, labels)."""
    if not isinstance(given, Mapping):
        return given
    return given["input_ids"] if given.get("labels") is None else (given["input_ids"], given["labels"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBatch:
    """Sequences of one step.

    Attributes:
        step: optimizer step that trains them.
        first_sequence: number of the first one in the stream.
        items: the sequences.
    """

    step: int
    first_sequence: int
    items: Sequence[Item]

    def columns(self) -> pa.Table:
        """Return the table of the sequences for the planner process."""
        items = self.items
        try:
            columns: dict[str, Any] = {"length": np.array([item.length for item in items], dtype=np.int64)}
            for name, kind in _FACTORS.items():
                columns[name] = np.array([item.factors.get(name, 0) for item in items], dtype=kind)
            if items and not items[0].is_row:
                columns["id"] = pa.array([item.given for item in items])
            return pa.table(columns)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise RunError(
                f"sequences {self.first_sequence} and on of the stream cannot be kept: {error}; ids are all numbers or "
                "all texts, factors are numbers"
            ) from error


def read_batches(stream: Iterable[Any], settings: OnlineSettings, *, step: int, sequence: int) -> Iterator[ReadBatch]:
    """Read a stream in whole batches, numbering steps from `step` and sequences from `sequence`."""
    for number, items in enumerate(_batches(iter(stream), settings, sequence), start=step):
        yield ReadBatch(step=number, first_sequence=sequence, items=items)
        sequence += len(items)


def _batches(stream: Iterator[Any], settings: OnlineSettings, sequence: int) -> Iterator[list[Item]]:
    batching = settings.metadata.batching
    if batching is not None and batching.by == "given":
        for batch in stream:
            if isinstance(batch, Mapping) or not isinstance(batch, Iterable) or _is_id_with_length(batch):
                raise RunError(
                    f"the stream gives {_shown(batch)} where a batch is due; name global_batch_size or "
                    "global_batch_tokens for a stream of single sequences: planner.online(global_batch_size=...)"
                )
            items = [item_of(given, sequence + place) for place, given in enumerate(batch)]
            sequence += len(items)
            yield items
        return
    items_of = (item_of(given, number) for number, given in enumerate(stream, start=sequence))
    if batching is not None and batching.tokens is not None:
        yield from cut_by_tokens(items_of, batching.tokens, lambda item: item.length)
    else:
        yield from cut_by_count(items_of, settings.metadata.global_batch_size)


def _is_id_with_length(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (int, str))


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."
