"""Keep Megatron's DDP from communicating inside the forwards and backwards of a step that follows a plan.

A rank's last backward may be a ring of which another member has micro-batches left, and its first forward a ring that
another member reaches later. A reduction or a gather over all ranks between two hops of such a ring waits for a rank
that waits for the hop behind it. So parameters are gathered before the step's first forward, and gradients reduced
after the last backward, regardless of `overlap_grad_reduce` and `overlap_param_gather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

_HELD = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


def gather_parameters(chunks: Iterable[Any]) -> None:
    """Finish every gather of parameters that the forwards of the next step would run. Collective.

    Megatron has no such gathers in its first step, where its own hooks are off.
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
    """Defer gradient reductions of a schedule that runs in this context to its end, when it finalises gradients.

    Without it, `overlap_grad_reduce` would start them inside backwards.

    Args:
        chunks: the chunks of the model, as the schedule is given them.
        config: the configuration of the first, where the schedule finds the functions that reduce; restored on leaving.
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
            # Newer Megatrons start the reduction as they finish it while they have not seen in which order gradients
            # come.
            if not any(getattr(group, "is_first_batch", False) for group in _bucket_groups(chunk)):
                chunk.start_grad_sync()

    def reduce_and_finalize(*args: Any, **kwargs: Any) -> Any:
        reduce()
        return finalize(*args, **kwargs)

    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    config.finalize_model_grads_func = None if finalize is None else reduce_and_finalize
    try:
        yield
        if finalize is None:  # the script does it after the schedule
            reduce()
    finally:
        held.close()
        for name, function in given.items():
            setattr(config, name, function)


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
