"""Checks, by running them, whether methods overridden by a script's trainer can follow a plan.

Overrides run unchanged. A `training_step` must call the Trainer's own exactly once and return its result; a loader may
be built in any way, as long as it visits rows at random or in order. `own_loss` checks `compute_loss`.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata

OWN_LOOP = "follow the plan in a loop of your own (docs/how-to/training-loop.md)"
_ORDER = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
_KNOWN_PACKAGES = ("transformers", "trl", "fcp_cli")
_MOST_BATCHES = 1000
"""Maximum number of batches of a loader that are compared, to limit the time on large data sets."""


class Override(NamedTuple):
    """A method of the script's own class that overrides the Trainer's."""

    owner: str
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name} ({self.place})"


def owner_of(trainer: Any, method: str) -> type:
    """Return the class that defines the method used by a trainer."""
    return next(kind for kind in type(trainer).__mro__ if method in vars(kind))


def find_override(trainer: Any, method: str) -> Override | None:
    """Return a trainer's method if it is defined outside transformers, TRL and fcp, else None."""
    kinds = (kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("fcp_cli."))
    owner = next(kind for kind in kinds if method in vars(kind))
    if owner.__module__.split(".")[0] in _KNOWN_PACKAGES:
        return None
    return Override(owner.__name__, method, place_of(vars(owner)[method]))


def place_of(function: Callable[..., Any]) -> str:
    """Return the file and line of a function; the file is relative to its folder on sys.path."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"a {type(function).__name__}"
    file = Path(code.co_filename)
    roots = [Path(root) for root in sys.path if root and file.is_relative_to(root)]
    nearest = max(roots, key=lambda root: len(root.parts), default=None)
    return f"{file.relative_to(nearest) if nearest else file}:{code.co_firstlineno}"


def check_order(trainer: Any, loader: Any, metadata: PlanMetadata) -> None:
    """Raise RunError unless the script's own loader visits rows at most once per epoch, at random or in order."""
    overrides = [found for name in _ORDER if (found := find_override(trainer, name)) is not None]
    batches = getattr(loader, "batch_sampler", None)
    if not overrides or batches is None:  # a stream is rejected by `CollatedRows`
        return
    by = " and ".join(map(str, overrides))
    with _same_random_state():
        first, second = (_drawn(batches, epoch) for epoch in range(2))
    rows = [row for batch in first for row in batch]
    largest = max(map(len, first), default=0)
    if not all(isinstance(row, (int, np.integer)) for row in rows):
        raise RunError(f"{by} packs rows into batches, but the plan packs; leave packing off")
    if len(set(rows)) != len(rows) or largest > trainer.args.per_device_train_batch_size:
        raise RunError(
            f"{by} visits {len(rows)} rows, {len(set(rows))} of them distinct, in batches of up to {largest}; under a "
            f"plan every row is visited once an epoch, in batches of {trainer.args.per_device_train_batch_size}"
        )
    if first != second:
        return
    if rows != sorted(rows):
        raise RunError(
            f"{by} visits the rows in the same order in every epoch, which is neither random nor the data's own; a "
            "plan would replace it: sort the data set in its place, and plan with 'fcp plan --no-shuffle'"
        )
    if metadata.shuffle:
        raise RunError(
            f"{by} visits the rows in the data's order, but the plan shuffles them; plan with 'fcp plan --no-shuffle'"
        )


def _drawn(batches: Any, epoch: int) -> list[list[Any]]:
    for part in (batches, getattr(batches, "batch_sampler", None), getattr(batches, "sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    return [list(batch) for batch in islice(batches, _MOST_BATCHES)]


@contextmanager
def _same_random_state() -> Iterator[None]:
    own, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)  # noqa: NPY002


class WatchedMethods:
    """Wraps a trainer's overridden methods to check their results while it follows a plan.

    Args:
        trainer: the script's trainer.
        loader: returns the loader of the plan's steps, even if a subclass overrides the method.

    Attributes:
        answers: results of plan steps since the current call of the script's `training_step` began.
    """

    def __init__(self, trainer: Any, loader: Callable[[], Any]) -> None:
        self._trainer = trainer
        self.answers: list[Any] = []
        replaced: dict[str, Callable[..., Any]] = {}
        if any(find_override(trainer, name) for name in _ORDER):
            replaced["get_train_dataloader"] = lambda *_, **__: loader()
        if (step := find_override(trainer, "training_step")) is not None:
            replaced["training_step"] = self._checked_step(step, trainer.training_step)
        if (batches := find_override(trainer, "get_batch_samples")) is not None:
            replaced["get_batch_samples"] = _checked_batches(batches, trainer.get_batch_samples)
        for name, method in replaced.items():
            setattr(trainer, name, method)
        self._replaced = tuple(replaced)

    def release(self) -> None:
        """Restore the trainer's own methods."""
        for name in self._replaced:
            delattr(self._trainer, name)

    def _checked_step(self, judged: Override, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.answers.clear()
            try:
                result = own(*args, **kwargs)
            except FcpError:
                raise
            except Exception as error:
                if self.answers:
                    raise
                raise RunError(
                    f"{judged} cannot run a step of the plan, whose tokens the Trainer's own training_step fetches: "
                    f"{type(error).__name__}: {error}; {OWN_LOOP}"
                ) from error
            if len(self.answers) != 1:
                raise RunError(
                    f"{judged} calls the Trainer's own training_step {len(self.answers)} times, and a plan's step runs "
                    f"in one call; remove the method, or {OWN_LOOP}"
                )
            if result is not self.answers[0]:
                raise RunError(
                    f"{judged} changes the result of the Trainer's own training_step; a plan follows methods that "
                    f"return it unchanged: remove the method, or {OWN_LOOP}"
                )
            return result

        return training_step


def _checked_batches(judged: Override, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def get_batch_samples(epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        expected = list(islice(epoch_iterator, num_batches))
        batches, items = own(iter(expected), num_batches, *args, **kwargs)
        if len(batches) != len(expected) or any(one is not other for one, other in zip(batches, expected, strict=True)):
            raise RunError(
                f"{judged} changes the batches of an optimizer step, but under a plan they come from the plan; remove "
                "the method"
            )
        return batches, items

    return get_batch_samples
