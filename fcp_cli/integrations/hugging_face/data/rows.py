"""Fetches single rows from the script's own data set and collator, and validates their lengths against the plan."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import DataLoader

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data.pictures import Collated, one_row
from fcp_cli.integrations.hugging_face.data.sampler import PlanSampler
from fcp_cli.masks import MaskedSequence, described
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.job_facts import PLANNING_VARIABLE
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runtime.agreement.plan_agreement import require_causal
from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.runtime.loss.labels import IGNORED
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
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RunError(
                f"the training data is a {type(dataset).__name__}, which is read in one go; a plan needs its rows by "
                "number: use a data set with random access (datasets.Dataset, not streaming)"
            )
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
        self._planned = PlanReader(plan).planned_lengths() if lengths is None else lengths
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
        planned = int(self._planned[row])
        if tokens != planned and (self._pairs or not tokens > planned == self._cut_tokens):
            raise RunError(
                f"row {row} of the training data has {tokens} tokens but {planned} in the plan's manifest "
                f"{self._name}; {_remedy(self._pairs)}"
            )
        self.learned[row] = int((torch.as_tensor(labels)[1:planned] != IGNORED).sum())
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
        planned = np.flatnonzero(self._planned)
        expected = stored if self._pairs or self._cut_tokens is None else np.minimum(stored, self._cut_tokens)
        differing = expected[planned] != self._planned[planned]
        doubtful: IntArray = planned[differing][:_READ_BEFORE]
        return doubtful

    def _spread(self) -> IntArray:
        """Return a few planned rows, spread over the data set."""
        planned = np.flatnonzero(self._planned)
        return planned[np.linspace(0, len(planned) - 1, num=min(_READ_BEFORE, len(planned)), dtype=np.int64)]


def _is_same(before: Collated, now: Collated) -> bool:
    ids, others = (found if isinstance(found, tuple) else (found.tokens, found.labels) for found in (before, now))
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ids, others, strict=True))


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
        "the plan was made of the data that training began with: data that changes between epochs, and a second "
        "trainer with other data, need plans of their own; make them with 'fcp plan', and start the script "
        "with 'fcp launch --plan PLAN'"
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
