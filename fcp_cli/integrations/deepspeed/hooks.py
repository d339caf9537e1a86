"""Hooks `deepspeed.initialize` and torch's DataLoader, so that a loop around a DeepSpeed engine follows the plan.

An engine passed to `session.steps` is not hooked.
"""

from __future__ import annotations

import importlib
import threading
from functools import wraps
from types import ModuleType
from typing import Any

from fcp_cli.integrations.base import Signatures, advice, require

KNOWN_TO_WORK = ("0.19.8",)

RELIED_ON: Signatures = {
    "DeepSpeedEngine.backward": (),
    "DeepSpeedEngine.gradient_accumulation_steps": (),
    "DeepSpeedEngine.zero_optimization_stage": (),
}
"""Methods of `deepspeed.runtime.engine` that are hooked or called."""


def hook_deepspeed(deepspeed: ModuleType) -> None:
    """Hook `deepspeed` right after its import, before the importing module uses it."""
    found = f"DeepSpeed {deepspeed.__version__}"
    engine = importlib.import_module("deepspeed.runtime.engine")
    remedy = advice("deepspeed", KNOWN_TO_WORK)
    require(deepspeed, {"initialize": ("model", "config")}, found=found, advice=remedy)
    require(engine, RELIED_ON, found=found, advice=remedy)
    make, loops = deepspeed.initialize, _Loops()

    @wraps(make)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        loops.add(made[0])
        return made

    deepspeed.initialize = initialize  # type: ignore[attr-defined]


class _Loops:
    """The engines of a script; the first batches of a loader determine which one is trained."""

    def __init__(self) -> None:
        self._engines: list[Any] = []
        self._loop: Any = None  # an EngineLoop
        self._is_reading = False

    def add(self, engine: Any) -> None:
        """Register a training engine; the first one hooks torch's DataLoader."""
        if not callable(getattr(engine.optimizer, "step", None)) or hasattr(engine, "train_schedule"):
            return  # for inference, or a pipeline engine
        if not self._engines:
            self._hook_loaders()
        self._engines = [*(one for one in self._engines if one.module.training), engine]

    def _hook_loaders(self) -> None:
        from torch.utils.data import DataLoader

        own = DataLoader.__iter__

        @wraps(own)
        def __iter__(loader: Any) -> Any:
            return self._followed(loader) if self._is_training(loader) else own(loader)

        DataLoader.__iter__ = __iter__  # type: ignore[method-assign]

    def _is_training(self, loader: Any) -> bool:
        """Return whether a loader feeds the script's own training loop, not an evaluation or a loop of fcp."""
        import torch

        from fcp_cli.runtime.session import Session

        # A script that started an fcp session before requesting any batch writes its loop around that session.
        is_of_fcp = self._loop is None and Session.has_begun
        return (
            not (self._is_reading or is_of_fcp)
            and threading.current_thread() is threading.main_thread()
            and torch.is_grad_enabled()
            and any(engine.module.training for engine in self._engines)
            and type(loader.sampler).__name__ != "PlanSampler"
        )

    def _followed(self, loader: Any) -> Any:
        from fcp_cli.integrations.deepspeed.loop import EngineLoop

        self._is_reading = True
        try:
            if self._loop is None or [self._loop.engine] != self._engines:
                if self._loop is not None:
                    self._loop.close()
                self._loop = EngineLoop(self._engines)
            self._loop.follow(loader)
        finally:
            self._is_reading = False
        return self._loop.epoch(loader)
