"""Megatron-Bridge's loader of global batches (`dataloader_type="batch"`), used by its fine-tuning recipes.

Its training step draws a rank's share of the global batch and splits it before it calls the schedule. Under a plan,
the split is skipped: the schedule gets the loader's own iterator, behind which the data set is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from fcp_cli.integrations.requirements import require

_SPLITS = "prepare_finetuning_batch"
_CYCLES = "cyclic_iter"


def hook_splitting(module: ModuleType) -> None:
    """Skip the split in training steps, detected by enabled gradients; evaluation is unchanged."""
    _require(module, _SPLITS, ("data_iterator", "num_microbatches", "default_seq_length"))
    split = getattr(module, _SPLITS)

    @wraps(split)
    def split_by_plan(data_iterator: Any, num_microbatches: int, default_seq_length: int, **more: Any) -> Any:
        if torch.is_grad_enabled():
            return data_iterator, default_seq_length
        return split(data_iterator, num_microbatches, default_seq_length, **more)

    setattr(module, _SPLITS, split_by_plan)


def hook_cycling(module: ModuleType) -> None:
    """Replace Bridge's endless loader, a generator, with one that exposes its data set."""
    _require(module, _CYCLES, ())
    setattr(module, _CYCLES, Cycle)


def _require(module: ModuleType, name: str, parameters: tuple[str, ...]) -> None:
    advice = 'versions 0.3.1 to 0.7.0 have it; set dataset.dataloader_type="single"'
    require(module, name, parameters, found="Megatron-Bridge", advice=advice)


class Cycle:
    """Yields a loader's batches in an endless loop: Bridge's generator, with the loader as an attribute."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self._rows = self._again_and_again()

    def _again_and_again(self) -> Iterator[Any]:
        while True:
            yield from self.iterable

    def __iter__(self) -> Cycle:
        return self

    def __next__(self) -> Any:
        return next(self._rows)
