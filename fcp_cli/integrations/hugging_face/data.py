"""Rows of a plan from a script's own data set, collator and loader workers, with their lengths validated.

`CollatedRows` fetches rows by number. `PlanSampler` makes a torch `DataLoader` read the rows that a plan assigns to
this rank:

    session = fcp.start("plan.parquet")
    sampler = fcp.PlanSampler(session)
    loader = DataLoader(dataset, sampler=sampler, collate_fn=collate, num_workers=4)
    session.fetch = sampler.fetch_from(loader)
    for step in session.steps(model):
        ...
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from fcp_cli.errors import MaskError, RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PLANNING_VARIABLE, PlanMetadata
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import orders_of_rank
from fcp_cli.runtime.loader import Fetch, JoinedSequences
from fcp_cli.runtime.plan_agreement import require_causal
from fcp_cli.runtime.session import Session
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.masks import CAUSAL, Mask, MaskedSequence, described, of_matrix, token_types
from fcp_cli.vision.families import FAMILIES
from fcp_cli.vision.parts import VisualSequence


class CollatedRows:
    """The session's `fetch` for a script's data: row number -> (tokens, labels), with masks if collated.

    Before the first step, the lengths of all rows are compared with the plan if the data set keeps its tokens in Arrow,
    else those of a few rows; the other rows are compared when they are loaded.

    Args:
        loader: the script's own loader, whose data set (row n is row n of the manifest), collator (called with one row
            at a time) and number of workers are used; padding is removed.
        plan, metadata: plan that the rows must match.
        pairs: whether a row is a chosen and a rejected answer, each with its prompt; its length is the sum of both.
        config: model config, if the collator may return images and videos; None: it returns none.
        lengths: [rows] tokens, if the plan is still being made.

    Attributes:
        learned: number of labeled tokens of each row read so far.
        lengths: [rows] planned tokens; 0: not planned.
    """

    def __init__(
        self,
        loader: Any,
        plan: Path,
        metadata: PlanMetadata,
        *,
        pairs: bool = False,
        config: Any = None,
        lengths: IntArray | None = None,
    ) -> None:
        dataset = loader.dataset
        if pairs:
            require_causal(metadata, plan, "pairs of answers")
        self._has_masks, self._needs_masks = metadata.masked_sequences is not None, metadata.masks is None
        rows, name = metadata.manifest.rows, metadata.manifest.name
        if len(dataset) != rows:
            raise RunError(
                f"the training data has {len(dataset)} rows, but the plan's manifest {name} has {rows}; "
                f"{_remedy(pairs)}"
            )
        self._loader, self._name, self._pairs, self._config = loader, name, pairs, config
        self._reading = Lock()  # shared by the prefetch thread and the check at each epoch
        self.learned: dict[int, int] = {}
        self.lengths = PlanReader(plan).planned_lengths() if lengths is None else lengths
        cut = metadata.overlong
        self._cut_tokens = cut.max_length if cut.policy == "truncate" else None
        for row in self._doubtful():
            self(int(row))

    def __call__(self, row: int) -> Collated:
        with self._reading:
            return self.read(self._loader.collate_fn([self._loader.dataset[row]]), row)

    def require_lengths(self) -> None:
        """Raise RunError if one of a few sampled rows differs in length from the plan.

        It detects data that a script changes between epochs, of which prefetch workers have an outdated copy.
        """
        with torch.random.fork_rng(devices=[]):  # keep the random state as without a plan
            for row in self._spread():
                self(int(row))

    def require_same(self, loader: Any) -> None:
        """Raise RunError if another loader of the script has different rows; the message names the first."""
        own, other = self._loader, loader
        if len(other.dataset) != len(own.dataset):
            raise RunError(
                f"the training data has {len(other.dataset)} rows, but had {len(own.dataset)} in the epochs before; "
                f"{_remedy(self._pairs)}"
            )
        for row in range(len(own.dataset)):
            before, now = self(row), self.read(other.collate_fn([other.dataset[row]]), row)
            if not _is_same(before, now):
                raise RunError(
                    f"row {row} of the training data has other tokens than in the epochs before; {_remedy(self._pairs)}"
                )

    def ahead(self, sampler: PlanSampler) -> Fetch:
        """Return a `fetch` that reads the same rows in as many worker processes as the script's loader has."""
        own = self._loader
        if not own.num_workers:
            return self
        loader = DataLoader(
            own.dataset,
            sampler=sampler,
            collate_fn=own.collate_fn,
            num_workers=own.num_workers,
            prefetch_factor=own.prefetch_factor,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context=own.multiprocessing_context,
        )
        return sampler.fetch_from(loader, read=self.read)

    def read(self, batch: Any, row: int) -> Collated:
        """Return the collator's result for one row; if it has no mask, the plan's applies."""
        found = one_row(batch, row, pairs=self._pairs, masked=self._has_masks, config=self._config)
        ids, labels = found if isinstance(found, tuple) else (found.tokens, found.labels)
        tokens = len(ids)
        self._check_mask(found, row)
        planned = int(self.lengths[row])
        if tokens != planned and (self._pairs or not tokens > planned == self._cut_tokens):
            raise RunError(
                f"row {row} of the training data has {tokens} tokens but {planned} in the plan's manifest "
                f"{self._name}; {_remedy(self._pairs)}"
            )
        self.learned[row] = int((_host_tensor(labels)[1:planned] != IGNORED).sum())
        return found

    def _check_mask(self, found: Any, row: int) -> None:
        """Reject a mask if the plan has none, and a missing mask if the plan does not specify the masks."""
        mask = found.mask if isinstance(found, (MaskedSequence, VisualSequence)) else None
        if isinstance(found, VisualSequence) and found.mask.is_causal:  # the collator returned no token types
            mask = None
        if mask is not None and not mask.plans_as_causal and not self._has_masks:
            raise RunError(
                f"the data collator gives row {row} of the training data a mask ({described(mask)}), but the plan's "
                f"manifest {self._name} has causal sequences; build it with 'fcp manifest build --mask', and plan again"
            )
        if mask is None and self._has_masks and self._needs_masks and not self._pairs:
            raise RunError(
                f"the plan was made for sequences with masks (column eta of {self._name}), but says not which, and the "
                f"data collator gives row {row} none; build the manifest with 'fcp manifest build --mask', or let the "
                "collator give the attention_mask [1, 1, tokens, tokens] that the model takes"
            )

    def _doubtful(self) -> IntArray:
        """Return rows to validate before the first step: those whose stored length differs, or else a sample."""
        stored = stored_lengths(self._loader.dataset, pairs=self._pairs)
        if stored is None:
            return self._spread()
        planned = np.flatnonzero(self.lengths)
        expected = stored if self._pairs or self._cut_tokens is None else np.minimum(stored, self._cut_tokens)
        differing = expected[planned] != self.lengths[planned]
        doubtful: IntArray = planned[differing][:_READ_BEFORE]
        return doubtful

    def _spread(self) -> IntArray:
        """Return a few planned rows, spread over the data set."""
        planned = np.flatnonzero(self.lengths)
        return planned[np.linspace(0, len(planned) - 1, num=min(_READ_BEFORE, len(planned)), dtype=np.int64)]


def _is_same(before: Collated, now: Collated) -> bool:
    ids, others = (found if isinstance(found, tuple) else (found.tokens, found.labels) for found in (before, now))
    return all(torch.equal(_host_tensor(a), _host_tensor(b)) for a, b in zip(ids, others, strict=True))


_READ_BEFORE = 8
_BUILD = "'fcp manifest build prepared --kind arrow --column {}' and 'fcp plan'"
_REBUILD = (
    "build the manifest from the data that the trainer trains on: trainer.train_dataset.save_to_disk('prepared'), then "
    + _BUILD.format("input_ids"),
    "build the manifest from the pairs that the trainer trains on, as in docs/how-to/hugging-face-trainers.md: save "
    "them with a column of lengths to 'prepared', then " + _BUILD.format("length"),
)


def _remedy(pairs: bool) -> str:
    if PLANNING_VARIABLE not in os.environ:
        return _REBUILD[pairs]
    return (
        "the plan was made of the data that training began with: data that changes between epochs cannot be planned, "
        "and a second trainer with other data needs a job of its own"
    )


def stored_lengths(dataset: Any, *, pairs: bool) -> IntArray | None:
    """Return the token counts [rows] of a `datasets.Dataset`, read from its Arrow offsets only.

    None for other types, rows computed on access, and other columns.
    """
    table: Any = getattr(dataset, "data", None)
    chosen: Any = getattr(dataset, "_indices", None)
    weights = {"prompt_ids": 2, "chosen_ids": 1, "rejected_ids": 1} if pairs else {"input_ids": 1}
    is_made = (getattr(dataset, "format", None) or {}).get("type") == "custom"
    if is_made or not set(weights) <= set(getattr(table, "column_names", ())):
        return None
    lengths: IntArray | None = None
    for name, weight in weights.items():
        try:
            found = pc.list_value_length(table.column(name)).to_numpy().astype(np.int64) * weight
        except pa.ArrowNotImplementedError:  # not a list column
            return None
        lengths = found if lengths is None else lengths + found
    return lengths if lengths is None or chosen is None else lengths[chosen.column(0).to_numpy()]


class PlanSampler(Sampler[int]):
    """The data set rows needed by this rank, in the order of its micro-batches.

    Row n of the data set is row n of the plan's manifest. A row distributed over several ranks is read by each of them.

    Args:
        session: session from `fcp_cli.runtime.start`.
        first_step: first optimizer step, as passed to `Session.steps`.
    """

    def __init__(self, session: Session, *, first_step: int = 0) -> None:
        self._session = session
        self._first_step = first_step
        self._drawn: deque[int | None] = deque()  # for a job planned while it trains

    def __iter__(self) -> Iterator[int]:
        session = self._session
        if session.source is not None:
            for row in session.source.rows_ahead():
                self._drawn.append(row)
                yield 0 if row is None else row  # a prefetch beyond the known plan reads an unused row
            return
        for step in PlanReader(session.plan).steps(self._first_step):
            for order in orders_of_rank(step, session.rank):
                yield from step.microbatch(int(order)).sequences

    def fetch_from(self, loader: DataLoader[Any], read: Callable[[Any, int], Any] | None = None) -> Fetch:
        """Return a session's `fetch` that takes rows from the workers of a loader with this sampler.

        Args:
            loader: either with `batch_size=1` and a collator that returns a dictionary of input_ids and labels
                [1, tokens], or with `batch_size=None` and a data set whose items have the format of `fetch` results.
            read: function that converts such a batch and its row to a `fetch` result.

        Raises:
            RunError: the loader has another sampler, larger batches, or a different number of rows than the manifest.
        """
        if loader.sampler is not self:
            raise RunError("the loader has another sampler; give it this one: DataLoader(dataset, sampler=sampler)")
        if loader.batch_size not in (None, 1):
            raise RunError(
                f"the loader has batch_size {loader.batch_size}, but the plan determines the rows of a micro-batch; "
                "remove it (1), or set it to None if items are tokens"
            )
        self._session.metadata.manifest.require_rows(len(loader.dataset))  # type: ignore[arg-type]
        has_masks = self._session.metadata.masked_sequences is not None
        read = read or partial(_as_fetched, masked=has_masks)
        is_planned = self._session.source is None
        order = iter(self) if is_planned else _popped(self._drawn)
        return _LoadedInOrder(loader, order, read)


class _LoadedInOrder:
    """A `fetch` that must be called with the sampler's rows in order, after one extra call that checks for labels."""

    def __init__(self, loader: DataLoader[Any], order: Iterator[int | None], read: Callable[[Any, int], Any]) -> None:
        self._loader, self._read = loader, read
        self._order = order  # order of the sampler
        self._batches = iter(loader)  # created here, not in the session's thread: workers are forked from this process
        self._is_begun = False

    def __call__(self, row: int) -> Any:
        if not self._is_begun:
            self._is_begun = True
            item = self._loader.dataset[row]
            return self._read(item if self._loader.batch_size is None else self._loader.collate_fn([item]), row)
        while (expected := next(self._order, -1)) is None:
            next(self._batches)
        if row != expected:
            raise RunError(
                f"the session needs row {row} of the data where the sampler has row {expected}; make a PlanSampler and "
                "a loader for each call of steps(), with the same first_step"
            )
        return self._read(next(self._batches), row)


def _popped(drawn: deque[int | None]) -> Iterator[int | None]:
    while drawn:
        yield drawn.popleft()


def _as_fetched(batch: Any, row: int, *, masked: bool) -> Any:
    return one_sequence(batch, row, masked=masked) if isinstance(batch, Mapping) else batch


# A row in a collated batch: tokens, labels and mask, without padding.

# Collator columns that are redundant with the tokens or the plan.
_REDUNDANT = frozenset({"attention_mask", "position_ids", "completion_mask", "seq_idx", "length"})
_TYPES = ("token_type_ids", "mm_token_type_ids")
_REDUNDANT_PREFIXES = ("cu_seq_lens", "max_length", "num_items")


def one_sequence(batch: Any, row: int, *, masked: bool = False) -> tuple[Tensor, Tensor] | MaskedSequence:
    """Return the tokens [n] and labels [n] of the single sequence in a batch, without padding.

    Includes its attention mask if the batch has one: an `attention_mask` [1, 1, n, n] as accepted by transformers,
    possibly one per layer type, or `token_type_ids` as in Gemma 3.

    Args:
        batch: collated batch.
        row: index of the row in the data set.
        masked: whether the plan uses masks; if not, token types that define one are rejected.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise RunError(f"for row {row} the data collator returns no dictionary with input_ids; a plan needs one")
    known = ("input_ids", "labels", *(_TYPES if masked else ()))
    foreign = [name for name in batch if name not in known and not _is_redundant(name, batch[name])]
    if foreign:
        raise RunError(
            f"the data collator gives {', '.join(sorted(map(str, foreign)))} besides the tokens of row {row}, which "
            "would be lost under a plan; remove it, or write the loop as in docs/how-to/training-loop.md"
        )
    if batch.get("labels") is None:
        raise RunError(
            f"the data collator gives no labels for row {row}; for language models, use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    tokens, labels = (_host_tensor(batch[name]) for name in ("input_ids", "labels"))
    if tokens.dim() != 2 or len(tokens) != 1 or labels.shape != tokens.shape:
        raise RunError(
            f"for row {row} the data collator returns input_ids of shape {tuple(tokens.shape)} and labels of "
            f"{tuple(labels.shape)}; a row must be one sequence, [1, tokens] each"
        )
    span = unpadded_slice(batch, row)
    positions = batch.get("position_ids")
    if positions is not None:
        row_positions = _host_tensor(positions)[..., span]
        if not bool((row_positions == torch.arange(row_positions.shape[-1], device="cpu")).all()):
            raise RunError(
                f"row {row} of the training data holds several sequences (its position_ids start again); leave packing "
                "off: the plan packs"
            )
    mask = _mask_of(batch, span, row) if masked or _is_explicit_mask(batch.get("attention_mask")) else None
    if mask is None:
        return tokens[0][span], labels[0][span]
    return MaskedSequence(tokens=tokens[0][span], labels=labels[0][span], mask=mask)


def one_pair(batch: Any, row: int) -> JoinedSequences:
    """Return the chosen and the rejected sequence in a batch of one pair, with TRL's `completion_mask` or labels."""
    answer_column = "labels" if isinstance(batch, Mapping) and "labels" in batch else "completion_mask"
    names = ("input_ids", "attention_mask", answer_column)
    if not isinstance(batch, Mapping) or any(name not in batch for name in names):
        raise RunError(f"for row {row} the data collator returns no pair with {', '.join(names)}; a plan needs one")
    tokens, mask, is_answer = (_host_tensor(batch[name]) for name in names)
    if answer_column == "labels":
        is_answer = is_answer != IGNORED
    if tokens.dim() != 2 or len(tokens) != 2:
        raise RunError(
            f"for row {row} the data collator returns input_ids of shape {tuple(tokens.shape)}, not of a pair"
        )
    kept_indices = [mask_row.nonzero().flatten() for mask_row in mask]
    ids = [token_row[kept] for token_row, kept in zip(tokens, kept_indices, strict=True)]
    labels = [
        token_row[kept].masked_fill(answer_row[kept] == 0, IGNORED)
        for token_row, kept, answer_row in zip(tokens, kept_indices, is_answer, strict=True)
    ]
    return JoinedSequences(tokens=torch.cat(ids), labels=torch.cat(labels), lengths=(len(ids[0]), len(ids[1])))


def _is_redundant(name: Any, value: Any) -> bool:
    if name in _TYPES:
        return not _host_tensor(value).any()
    return name in _REDUNDANT or str(name).startswith(_REDUNDANT_PREFIXES) or value is None


def _is_explicit_mask(mask: Any) -> bool:
    """Return whether an attention mask defines more than padding."""
    return isinstance(mask, Mapping) or (mask is not None and _host_tensor(mask).dim() == 4)


def _mask_of(batch: Mapping[Any, Any], span: slice, row: int) -> Mask | None:
    """Return the attention mask of a batch, or None if it has none."""
    given = batch.get("attention_mask")
    if not _is_explicit_mask(given):
        types = next((batch[name] for name in _TYPES if batch.get(name) is not None), None)
        return None if types is None else token_types(_host_tensor(types)[0][span].tolist())
    # If layer types have different masks, the full-attention layers define the mask.
    name = "full_attention"
    if isinstance(given, Mapping) and name not in given:
        raise RunError(f"the attention mask of row {row} is for layers of {', '.join(given)}, and none of {name}")
    given = given[name] if isinstance(given, Mapping) else given
    if given is None:  # None means causal in transformers
        return CAUSAL
    matrix = _host_tensor(given)
    tokens = _host_tensor(batch["input_ids"]).shape[1]
    if matrix.shape != (1, 1, tokens, tokens):
        raise RunError(
            f"the attention mask of row {row} has the shape {tuple(matrix.shape)}; a mask of {tokens} tokens has "
            f"{(1, 1, tokens, tokens)}"
        )
    seen = matrix[0, 0] if matrix.dtype == torch.bool else matrix[0, 0] == 0
    try:
        return of_matrix(seen[span, span].numpy())
    except MaskError as error:
        raise RunError(f"the attention mask of row {row} cannot be followed: {error}; give spans, or none") from error


def _host_tensor(values: Any) -> Tensor:
    """Return a row's or a collator's values on the host, even if the script has another default device."""
    return torch.as_tensor(values, device="cpu")


def unpadded_slice(batch: Mapping[Any, Any], row: int) -> slice:
    """Return the slice of the sequence between its padding, in a batch of one."""
    mask = batch.get("attention_mask")
    if mask is None or _is_explicit_mask(mask):
        return slice(0, _host_tensor(batch["input_ids"]).shape[1])
    kept = _host_tensor(mask)[0].nonzero().flatten()
    if not len(kept) or int(kept[-1] - kept[0]) + 1 != len(kept):
        raise RunError(f"the attention mask of row {row} has gaps, which a plan cannot follow")
    return slice(int(kept[0]), int(kept[-1]) + 1)


# Images and videos of a collated row, in the format of the model's processor.

Collated: TypeAlias = tuple[Tensor, Tensor] | MaskedSequence | VisualSequence | JoinedSequences
_PIXELS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_position_ids",
)
_MASKS_BY_TYPES = frozenset({"gemma3"})
"""Model families whose token types define the mask; in others they only repeat the placeholder positions."""


def one_row(batch: Any, row: int, *, pairs: bool = False, masked: bool = False, config: Any = None) -> Collated:
    """Return the only row of a collated batch.

    Args:
        batch: collated batch.
        row: index of the row in the data set.
        pairs: whether the row is a preference pair.
        masked: whether the plan uses masks.
        config: model config; only the model types in `FAMILIES` have images.
    """
    if pairs:
        return one_pair(batch, row)
    if has_pictures(config) and isinstance(batch, Mapping) and "input_ids" in batch:
        return _visual_row(batch, row, masked, config)
    return one_sequence(batch, row, masked=masked)


def has_pictures(config: Any) -> bool:
    """Return whether a model's images and videos can follow a plan."""
    return getattr(config, "model_type", None) in FAMILIES


def has_masks_of_types(config: Any) -> bool:
    """Return whether a model's token types define the mask: image tokens attend to each other bidirectionally."""
    return getattr(config, "model_type", None) in _MASKS_BY_TYPES


def _visual_row(batch: Mapping[Any, Any], row: int, masked: bool, config: Any) -> Collated:
    has_masks = has_masks_of_types(config)
    types = None if has_masks else batch.get("mm_token_type_ids")
    span = unpadded_slice(batch, row)
    ids = _host_tensor(batch["input_ids"])[0][span].numpy()
    is_placeholder = np.isin(ids, [config.image_token_id, getattr(config, "video_token_id", config.image_token_id)])
    is_visual = bool(is_placeholder.any())
    family: Any = FAMILIES[config.model_type]
    pixels = [name for name in _PIXELS if name in inspect.signature(family.visual_sequence).parameters]
    # Image positions are the model's own 3-axis positions; text positions must be 0, 1, 2, ... Models ignore the
    # seconds per frame that they do not use; rope_deltas are only for generation.
    taken = {
        *pixels,
        "second_per_grid_ts",
        "rope_deltas",
        *(() if has_masks else ("mm_token_type_ids",)),
        *(("position_ids",) if is_visual else ()),
    }
    found = one_sequence({name: value for name, value in batch.items() if name not in taken}, row, masked=masked)
    if not is_visual:  # some collators add a blank image to the padding of text-only rows
        return found
    if types is not None and not np.array_equal(_host_tensor(types)[0][span].numpy() > 0, is_placeholder):
        raise RunError(
            f"the mm_token_type_ids of row {row} of the training data mark other tokens as images than its "
            "placeholders; let the collator return those of the processor"
        )
    tokens, labels = found if isinstance(found, tuple) else (found.tokens, found.labels)
    pictures = {name: batch[name] for name in pixels if batch.get(name) is not None}
    try:
        made: VisualSequence = family.visual_sequence(config, tokens, labels=labels, **pictures)
    except RunError as error:
        raise RunError(f"row {row} of the training data: {error}") from error
    _require_positions(batch.get("position_ids"), made, span, row)
    # Like transformers, apply no image mask in sliding windows unless the batch has token types.
    of_images = made.mask if made.mask.plans_as_causal and types is not None else CAUSAL
    return replace(made, mask=found.mask if isinstance(found, MaskedSequence) else of_images)


def _require_positions(given: Any, made: VisualSequence, span: slice, row: int) -> None:
    """Raise RunError if the collator's positions differ from those that the model computes, which a plan uses."""
    if given is None:
        return
    own = _host_tensor(given)[..., span].flatten(0, -2)[-3:].numpy()  # some collators put the text positions first
    counted = np.arange(own.shape[-1]) if made.position_ids is None else made.position_ids
    if own.shape[-2:] != np.broadcast_shapes(own.shape, counted.shape) or (own != counted).any():
        raise RunError(
            f"the position_ids of row {row} of the training data are not those that its model computes for its images; "
            "remove them from the collator's batch"
        )
