"""Tells Megatron and MindSpeed, per call, which ranks share its sequences or gradients.

Both keep one static answer in module globals and read it, through functions, wherever they need it. Those functions
are wrapped: within a call that has a placement they answer with it, and otherwise as before. The globals stay as they
are, so that code outside the call is not affected.
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
        data: process group of data-parallel sums, whether asked for with context parallelism or without.
    """

    ranks: tuple[int, ...] = ()
    index: int = 0
    group: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None


_current: ContextVar[Placement | None] = ContextVar("current_placement", default=None)

# By the function that is asked: the answer, or None to leave it to the function itself.
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
    """Make the functions in `_ANSWERS` return the placement of the call, for all modules that imported them."""
    for path, answer in _ANSWERS.items():
        wrap_everywhere(path, _answering(answer))
    wrap_everywhere(_SLICE_TABLE, _whole_table_wrapper)


def _whole_table_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do not slice rotary tables on a one-rank group. Newer Megatrons use the group that a module was created with."""

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
    """Wrap the function at `path` with `wrapper`, in its module and in all that imported it by name.

    MindSpeed's own patch manager does it if there is one, so that it knows of it; it takes a function for a
    wrapper if its name ends in `wrapper`.
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
