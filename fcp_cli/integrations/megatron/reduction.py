"""Keeps Megatron's DDP from communicating within the forwards and backwards of a planned step, which could deadlock.

Members of a ring may be at different points of their step: it is the last micro-batch of one and not of another. An
all-rank reduction or gather between two hops of the ring would wait for a rank that itself waits for the next hop. So
parameters are gathered before the step's first forward, and gradients reduced after the last backward, regardless of
`overlap_grad_reduce` and `overlap_param_gather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

_HELD = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


def gather_parameters(chunks: Iterable[Any]) -> None:
    """Run all parameter gathers that Megatron would overlap with the forwards of the next step. Collective.

    There are none in the first step, in which Megatron disables its own hooks.
    """
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and config.overlap_param_gather and chunk.remove_forward_pre_hook_handles:
            _gather(_bucket_groups(chunk))


def _gather(groups: Sequence[Any]) -> None:
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


@contextmanager
def reduced_after_backwards(chunks: Sequence[Any], config: Any) -> Iterator[None]:
    """Defer the gradient reductions of a schedule run in this context until it finalizes gradients.

    Otherwise, `overlap_grad_reduce` would start them inside backwards.

    Args:
        chunks: model chunks, as passed to the schedule.
        config: configuration of the first chunk, which holds the schedule's reduction functions; restored on exit.
    """
    overlapping = [
        chunk for chunk in chunks if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False)
    ]
    if not overlapping:
        yield
        return
    given = {name: getattr(config, name) for name in _HELD}
    finalize = given["finalize_model_grads_func"]
    held = ExitStack()
    for chunk in overlapping:
        held.enter_context(chunk.no_sync())

    def reduce() -> None:
        held.close()
        for chunk in overlapping:
            # In the first batch, newer versions start the reduction themselves when they finish it.
            if not any(getattr(group, "is_first_batch", False) for group in _bucket_groups(chunk)):
                chunk.start_grad_sync()

    def reduce_and_finalize(*args: Any, **kwargs: Any) -> Any:
        reduce()
        return finalize(*args, **kwargs)

    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    config.finalize_model_grads_func = None if finalize is None else reduce_and_finalize
    try:
        yield
        if finalize is None:  # the script finalizes after the schedule
            reduce()
    finally:
        held.close()
        for name, function in given.items():
            setattr(config, name, function)


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
