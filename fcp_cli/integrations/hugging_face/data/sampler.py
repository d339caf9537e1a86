"""`PlanSampler`, which makes a torch `DataLoader` read the rows that a plan assigns to this rank.

session = fcp.start("plan.parquet")
sampler = fcp.PlanSampler(session)
loader = DataLoader(dataset, sampler=sampler, collate_fn=collate, num_workers=4)
session.fetch = sampler.fetch_from(loader)
for step in session.steps(model):
    ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Sampler

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data.batches import one_sequence
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.data.cursor import orders_of_rank
from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.runtime.session.session import Session


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
        order = self.__iter__() if is_planned else (row for row in _popped(self._drawn))
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
