"""Overrides the process groups of Megatron and MindSpeed per call.

Both keep static groups in module globals, which they read through functions. The wrapped functions return the current
placement's group inside a call with a placement, else the original. The globals are unchanged, so code outside the
call is not affected.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist

_PARALLEL_STATE = "megatron.core.parallel_state"
_SLICE_TABLE = "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Process groups of a call; missing ones keep Megatron's static values.

    Attributes:
        ranks: global ranks of the context-parallel group.
        index: index of this process in `ranks`.
        group: process group of them.
        data: data-parallel group, with and without context parallelism.
    """

    ranks: tuple[int, ...] = ()
    index: int = 0
    group: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None


_current: ContextVar[Placement | None] = ContextVar("current_placement", default=None)

# Function path -> override from the placement; None: call the original.
_ANSWERS: Mapping[str, Callable[[Placement], Any]] = {
    f"{_PARALLEL_STATE}.get_context_parallel_group": lambda placement: placement.group,
    f"{_PARALLEL_STATE}.get_context_parallel_global_ranks": lambda placement: list(placement.ranks) or None,
    f"{_PARALLEL_STATE}.get_context_parallel_world_size": lambda placement: len(placement.ranks) or None,
    f"{_PARALLEL_STATE}.get_context_parallel_rank": lambda placement: placement.index if placement.ranks else None,
    f"{_PARALLEL_STATE}.get_data_parallel_group": lambda placement: placement.data,
}


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Use a placement for calls of this thread."""
    token = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(token)


def hook_parallel_state() -> None:
    """Hook the functions in `_ANSWERS` to return the call's placement, in all modules that imported them."""
    for path, answer in _ANSWERS.items():
        wrap_everywhere(path, _answering(answer))
    wrap_everywhere(_SLICE_TABLE, _whole_table_wrapper)


def _whole_table_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip slicing rotary tables under a one-rank placement: newer versions use the group stored in the module."""

    @wraps(original)
    def slice_table(table: Any, *args: Any, **kwargs: Any) -> Any:
        placement = _current.get()
        return table if placement is not None and len(placement.ranks) == 1 else original(table, *args, **kwargs)

    return slice_table


def _answering(answer: Callable[[Placement], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def placement_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def asked(*args: Any, **kwargs: Any) -> Any:
            placement = _current.get()
            found = None if placement is None else answer(placement)
            return original(*args, **kwargs) if found is None else found

        return asked

    return placement_wrapper


def wrap_everywhere(path: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function at `path` in its module and in all modules that imported it by name.

    If MindSpeed's patch manager is loaded, the wrapper is registered there. It treats functions as wrappers only if
    their name ends in `wrapper`.
    """
    manager = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    if manager is not None:
        manager.register_patch(path, wrapper)
        manager.apply_patches()
        return
    home, name = path.rsplit(".", 1)
    original = getattr(importlib.import_module(home), name)
    wrapped = wrapper(original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)
