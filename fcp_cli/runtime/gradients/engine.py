"""Gradient reduction of DeepSpeed engines, with ZeRO 0 to 3.

An engine reduces gradients inside every backward, or inside the last of a batch, which it determines by counting to its
configured number of micro-batches. Under a plan ranks have different numbers of micro-batches, and which is the last
depends on the step. Reductions are therefore deferred to the end of the step (`coalesce_grad_reduction`), at any stage.
Alternatively, if ZeRO 2 or 3 keeps gradients sharded, they run in every backward of waves, of which all ranks have the
same number.

As in any DeepSpeed loop, the script may call `engine.step()` after every micro-batch, and only the last call of a step
has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.recipe import Reduce
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.gradients.base import GradientSync

_SUBSTITUTED = ("step", "set_gradient_accumulation_boundary")


def engine_sync(engine: Any, world: World, sync: Sync, reduce: Reduce) -> EngineSync:
    """Return the gradient reducer of a DeepSpeed engine.

    Args:
        engine: the engine of `deepspeed.initialize`.
        world: all ranks.
        sync: the plan's sync mode.
        reduce: when ZeRO 2 and 3 reduce gradients in waves: in every `wave`, or once a `step`.
    """
    _check_engine(engine, world)
    stage = int(engine.zero_optimization_stage())
    if stage == 3 and sync == "iteration":
        raise RunError(
            "the DeepSpeed engine has ZeRO stage 3 and gathers its weights again for every micro-batch, of which ranks "
            "run different numbers under sync iteration; set stage 2, or plan with 'fcp plan --sync microbatch'"
        )
    return EngineSync(engine, reduces_waves=stage >= 2 and sync == "microbatch" and reduce == "wave")


class EngineSync(GradientSync):
    """DeepSpeed engine whose gradients are reduced once a step, after all backwards, or in every wave."""

    lets_ranks_run_apart = False

    def __init__(self, engine: Any, *, reduces_waves: bool) -> None:
        self._engine = engine
        self._reduces_waves = reduces_waves
        self._held_back = ExitStack()
        self._has_begun = False
        self._reduced_at = -1  # the engine's step count at the last reduction
        self._asked_step: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.loss_factor = _divisor(engine)

    def summed(self) -> Iterator[nn.Parameter]:
        return self._engine.module.parameters()  # type: ignore[no-any-return]

    def begin(self) -> None:
        if self._engine.global_steps == self._reduced_at:
            raise RunError(
                "the DeepSpeed engine took no step with the gradients of the plan's step before, and cannot add to "
                "them; call engine.step() after every step of the plan"
            )

    def before_microbatch(self, *, is_last: bool) -> None:
        engine = self._engine
        self.loss_factor = _divisor(engine)
        if not self._has_begun:
            self._begin()
        # Call the class's method: `_begin` shadows it on the instance, so that the script cannot move the boundary.
        type(engine).set_gradient_accumulation_boundary(engine, self._reduces_waves and is_last)
        self._asked_step = None  # only a call after the last micro-batch counts

    def _begin(self) -> None:
        engine = self._engine
        self._has_begun = True
        engine.step = self._ask_for_step
        engine.set_gradient_accumulation_boundary = lambda is_boundary: None
        if not self._reduces_waves:
            self._held_back.enter_context(_without_reductions(engine))

    def _ask_for_step(self, *args: Any, **kwargs: Any) -> None:
        self._asked_step = (args, kwargs)

    def reduce(self) -> None:
        """Reduce the deferred gradients."""
        self._leave_engine()
        self._reduced_at = self._engine.global_steps
        self._held_back.close()
        # The boundary stays set: `engine.step()` checks it, in `finish` or in the script.
        self._engine.set_gradient_accumulation_boundary(True)

    def drop(self) -> None:
        raise RunError(
            "a DeepSpeed engine cannot skip a step whose loss is not finite; stop there (on_nan='stop'), or train in "
            "fp16, where the engine skips it by itself"
        )

    def finish(self) -> None:
        """Run the optimizer step that the loop requested after its last micro-batch."""
        if self._asked_step is not None:
            args, kwargs = self._asked_step
            self._asked_step = None
            self._engine.step(*args, **kwargs)

    def restore(self) -> None:
        with _without_flush(self._engine):  # abandoned step: reducing on exit could hang
            self._held_back.close()
        self._leave_engine()

    def _leave_engine(self) -> None:
        self._has_begun = False
        for name in _SUBSTITUTED:
            vars(self._engine).pop(name, None)


@contextmanager
def _without_reductions(engine: Any) -> Iterator[None]:
    """Keep gradients local to each rank within the block; reduce them on exit."""
    if hasattr(engine.optimizer, "_coalesce_grad_reduction"):
        with engine.coalesce_grad_reduction():
            yield
        return
    # Stage 0, and stage 1 in bf16 with fp32 gradients, have an older optimizer without `_coalesce_grad_reduction`.
    with engine.no_sync():
        yield
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()


@contextmanager
def _without_flush(engine: Any) -> Iterator[None]:
    """Disable an engine's reductions within the block."""
    names = [name for name in dir(type(engine)) if name.startswith("_flush_coalesced_reduction")]
    names.append("allreduce_gradients")
    # Instance attributes shadow the methods of the class until they are popped.
    vars(engine).update(dict.fromkeys(names, lambda *_: None))
    try:
        yield
    finally:
        for name in names:
            vars(engine).pop(name)


def _divisor(engine: Any) -> float:
    """Return the divisor of an engine's gradients: the number of ranks times its configured number of micro-batches."""
    ranks = engine.dp_world_size if engine.gradient_average else 1
    return float(ranks * engine.gradient_accumulation_steps())


def _check_engine(engine: Any, world: World) -> None:
    """Raise RunError if an engine does anything to gradients but reduce them over all ranks."""
    optimizer = engine.optimizer
    held = hasattr(optimizer, "_coalesce_grad_reduction") or type(optimizer).__name__ == "BF16_Optimizer"
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)
    for is_refused, feature in (
        (not hasattr(optimizer, "step"), "no optimizer; give deepspeed.initialize one"),
        (
            engine.zero_optimization_stage() and not held,
            "an optimizer that cannot hold gradients back until the step ends; install DeepSpeed 0.19.8 or newer",
        ),
        (not engine.enable_backward_allreduce, "an optimizer that sends gradients itself (1-bit); use another"),
        (engine.dp_world_size != world.size, f"{engine.dp_world_size} of {world.size} ranks to reduce over; use all"),
        (engine.has_moe_layers, "experts of DeepSpeed, whose gradients are reduced over fewer ranks"),
        (bool(getattr(engine, "zenflow", False)), "ZenFlow, which reduces gradients at other times; remove it"),
        (not managed(), "managed_gradient_accumulation off; leave it on: the plan says which micro-batch is the last"),
        (type(optimizer).__name__.startswith("MiCS"), "MiCS, which is not tested; use ZeRO stage 3"),
    ):
        if is_refused:
            raise RunError(f"the DeepSpeed engine has {feature}")
