"""Run a model outside the plan, between steps or inside one: evaluation, generation, a second model.

    with fcp.outside():
        with torch.no_grad():
            validation_loss = evaluate(model)

Inside the block no micro-batch is current: `attention` attends over the whole batch it is given, and a model that an
integration prepared uses its original attention, masks and cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from fcp_cli.runtime.ring_attention.ring import current_ring, runs_outside

_switches: WeakKeyDictionary[Any, Callable[[Any], AbstractContextManager[None]]] = WeakKeyDictionary()


def switch_outside(model: Any, switch: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Register a context manager `switch(model)` that `outside` enters; dropped when the model is freed."""
    _switches[model] = switch


@contextmanager
def outside() -> Iterator[None]:
    """Leave the plan for a `with` block, on one rank or on all.

    FSDP2 gathers weights in every forward, so with a sharded model all ranks must run the same number of forwards.
    """
    ring, was_outside = current_ring.get(), runs_outside.get()
    with ExitStack() as stack:
        if not was_outside:
            # Iterate over a copy: a model freed meanwhile removes itself from the dictionary.
            for model, switch in list(_switches.items()):
                stack.enter_context(switch(model))
        current_ring.set(None)
        runs_outside.set(True)
        try:
            yield
        finally:
            current_ring.set(ring)
            runs_outside.set(was_outside)
