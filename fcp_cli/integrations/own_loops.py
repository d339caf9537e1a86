"""Refuse the training loops of frameworks that no plan can drive, at their start, and name a replacement.

All would be stopped before their first optimizer step, as any script is in which nothing follows the plan; but by then
weights have been read and a step has been computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations.requirements import require

_TITAN_LOOP = ("train", "train_step", "forward_backward_step", "_forward_backward_body")


def refuse_torchtitan(trainer: ModuleType) -> None:
    """Make `torchtitan.trainer`'s Trainer refuse to be made, unless a subclass has its own loop."""
    found = "this torchtitan"
    require(trainer, "Trainer.train", ("self",), found=found, advice="version known to be looked at: 0.3.0")
    _refuse_unless_replaced(
        trainer.Trainer,
        _TITAN_LOOP,
        "torchtitan's Trainer reads a stream of text in pieces of one length, which are no rows of a manifest, "
        f"and so would train without the plan {os.environ.get('FCP_PLAN')}; train torchtitan's model in a loop "
        "over the plan's steps (docs/how-to/training-loop.md, torchtitan)",
    )


def refuse_verl(dataset_utils: ModuleType) -> None:
    """Make verl's SFT trainers refuse to collate; no other trainer uses `verl.utils.dataset.dataset_utils`."""
    advice = "version known to be looked at: 0.9.1"
    require(dataset_utils, "SFTTensorCollator", ("pad_mode",), found="this verl", advice=advice)
    _refuse_unless_replaced(
        dataset_utils.SFTTensorCollator,
        ("__call__",),
        "verl's SFT trainer cuts each global batch into micro-batches of its own on every data-parallel rank, and so "
        f"would train without the plan {os.environ.get('FCP_PLAN')}; train the same data by transformers' Trainer or "
        "one of the frameworks around it (docs/how-to/hugging-face-trainers.md)",
    )


def _refuse_unless_replaced(kind: Any, loop: Sequence[str], message: str) -> None:
    """Make a class refuse to be made where all methods of its loop are its own."""
    own = {name: getattr(kind, name, None) for name in loop}
    make = kind.__init__

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if all(getattr(type(self), name, None) is method for name, method in own.items()):
            raise RunError(message)
        make(self, *args, **kwargs)

    kind.__init__ = __init__


def refuse_torchtune(parsing: ModuleType) -> None:
    """Make the recipes that torchtune ships refuse to run; `torchtune.config._parse` decorates their main functions.

    Copies of them are scripts of their own.
    """
    require(parsing, "parse", ("recipe_main",), found="this torchtune", advice="version known to be looked at: 0.6.1")
    decorate = parsing.parse
    shipped = Path(str(parsing.__file__)).parents[2] / "recipes"

    @wraps(decorate)
    def parse(recipe_main: Callable[..., Any]) -> Callable[..., Any]:
        run = decorate(recipe_main)
        recipe = Path(recipe_main.__code__.co_filename)

        @wraps(run)
        def start(*args: Any, **kwargs: Any) -> Any:
            if shipped in recipe.parents:
                raise RunError(
                    f"torchtune's recipe {recipe.name} takes an optimizer step after every gradient_accumulation_steps "
                    f"batches of its own, and so would train without the plan {os.environ.get('FCP_PLAN')}; put a loop "
                    "over the plan's steps into a copy of it (docs/how-to/training-loop.md, torchtune)"
                )
            return run(*args, **kwargs)

        return start

    parsing.parse = parse  # type: ignore[attr-defined]
