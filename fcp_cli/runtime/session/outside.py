"""Run a model outside the plan: evaluation, generation, a second model; between steps or inside one.

    with fcp.outside():
        with torch.no_grad():
            validation_loss = evaluate(model)

Inside, no micro-batch is current: `attention` attends over the whole batch that it is given, and a model that an
integration prepared runs as it did before, with its own attention, masks and cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from fcp_cli.runtime.ring_attention.ring import current_ring, runs_outside

_switches: WeakKeyDictionary[Any, Callable[[Any], AbstractContextManager[None]]] = WeakKeyDictionary()


def switch_outside(model: Any, switch: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Have `switch(model)` entered wherever a script is outside the plan, for as long as the model lives."""
    _switches[model] = switch


@contextmanager
def outside() -> Iterator[None]:
    """Leave the plan for a `with` block, on one rank or on all.

    A model sharded by FSDP2 gathers its weights in every forward, so all ranks must run equally many forwards.
    """
    ring, was_outside = current_ring.get(), runs_outside.get()
    with ExitStack() as stack:
        if not was_outside:
            # A copy, since a model may be freed meanwhile, and leave the dictionary.
            for model, switch in list(_switches.items()):
                stack.enter_context(switch(model))
        current_ring.set(None)
        runs_outside.set(True)
        try:
            yield
        finally:
            current_ring.set(ring)
            runs_outside.set(was_outside)
