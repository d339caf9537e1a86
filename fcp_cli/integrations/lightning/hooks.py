"""Hooks Lightning's Trainer to follow the plan, for modules with automatic optimization.

Three functions are hooked: the preparation of the training loader, the closure of an optimizer step, and the teardown
of a fit. Modules with manual optimization use `PlannedSteps`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from fcp_cli.integrations.base import Signatures, advice, require
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import Step

KNOWN_TO_WORK = ("2.6.6",)
_FIT = "_fcp_fit"
RELIED_ON: Signatures = {"_process_dataloader": ("trainer", "stage", "dataloader"), "_FitLoop.teardown": ()}
"""Functions of `lightning.pytorch.loops.fit_loop` that are hooked."""
RELIED_ON_OF_STEPS: Signatures = {
    "Closure": ("step_fn", "backward_fn", "zero_grad_fn"),
    "ClosureResult": ("closure_loss", "extra"),
    "_AutomaticOptimization._make_closure": ("kwargs", "optimizer", "batch_idx"),
    "_AutomaticOptimization._make_backward_fn": ("optimizer",),
    "_AutomaticOptimization._make_zero_grad_fn": ("batch_idx", "optimizer"),
    "_AutomaticOptimization._training_step": ("kwargs",),
}
"""The same of `lightning.pytorch.loops.optimization.automatic`."""


def hook_fit_loop(fit_loop: ModuleType) -> None:
    """Hook `lightning.pytorch.loops.fit_loop` (or `pytorch_lightning`'s), right after its import."""
    package = fit_loop.__name__.removesuffix(".loops.fit_loop")
    automatic = importlib.import_module(f"{package}.loops.optimization.automatic")
    found = f"Lightning {importlib.import_module(package).__version__}"
    for module, wanted in ((fit_loop, RELIED_ON), (automatic, RELIED_ON_OF_STEPS)):
        require(module, wanted, found=found, advice=advice("lightning", KNOWN_TO_WORK))
    _hook_loader_and_teardown(fit_loop)
    _hook_steps(automatic)


def _hook_loader_and_teardown(fit_loop: Any) -> None:
    process_dataloader, end_fit = fit_loop._process_dataloader, fit_loop._FitLoop.teardown

    @wraps(process_dataloader)
    def _process_dataloader(trainer: Any, trainer_fn: Any, stage: Any, dataloader: Any) -> Any:
        own_loader = process_dataloader(trainer, trainer_fn, stage, dataloader)
        if not trainer.lightning_module.automatic_optimization:
            return own_loader
        # The runtime is imported when a trainer is used: Lightning is still being imported when it is hooked.
        from fcp_cli.integrations.lightning.fit import LightningFit

        if _FIT not in vars(trainer):
            setattr(trainer, _FIT, LightningFit(trainer, own_loader))
        else:
            getattr(trainer, _FIT).follow(own_loader)
        return getattr(trainer, _FIT).loader()

    @wraps(end_fit)
    def teardown(self: Any) -> None:
        fit = vars(self.trainer).pop(_FIT, None)
        if fit is not None:
            fit.close()
        end_fit(self)

    fit_loop._process_dataloader = _process_dataloader
    fit_loop._FitLoop.teardown = teardown


def _hook_steps(automatic: Any) -> None:
    loop_class = automatic._AutomaticOptimization
    make_closure = loop_class._make_closure

    @wraps(make_closure)
    def _make_closure(self: Any, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        fit = vars(self.trainer).get(_FIT)
        if fit is None:
            return make_closure(self, kwargs, optimizer, batch_idx)
        fit.begin()
        zero_grad, backward = self._make_zero_grad_fn(batch_idx, optimizer), self._make_backward_fn(optimizer)

        def training_step(batch: Any) -> Any:
            return self._training_step({**kwargs, "batch": batch})

        def run() -> Any:
            if zero_grad is not None:
                zero_grad()
            if self.trainer.fit_loop._should_accumulate():
                return automatic.ClosureResult(closure_loss=fit.nothing())
            loss, extra = fit.run(training_step, backward)
            return automatic.ClosureResult(closure_loss=loss, extra=extra)

        return automatic.Closure(step_fn=run, backward_fn=None, zero_grad_fn=None)

    loop_class._make_closure = _make_closure


# Manual optimization: the steps of a plan as a data loader.
#
#     class Model(lightning.LightningModule):
#         automatic_optimization = False
#
#         def train_dataloader(self):
#             return PlannedSteps(fcp.start(fetch=tokens_of), self.trainer.strategy.model)
#
#         def training_step(self, step, _):
#             for batch in step:
#                 self.manual_backward(batch.loss(self.model(batch.input_ids, batch.position_ids)))
#             self.optimizers().step()
#             self.optimizers().zero_grad()
#
# Lightning itself is not imported.


class PlannedSteps:
    """The steps of a session as a loader. It has a length, without which Lightning would prefetch one step ahead.

    Its state is saved in Lightning's checkpoints, so `Trainer.fit(..., ckpt_path=...)` resumes with the next step.

    Args:
        session: session from `fcp_cli.runtime.start`.
        model: argument of `Session.steps`: in a LightningModule, `self.trainer.strategy.model`, with its wrapper.
        first_step: first optimizer step, unless a Lightning checkpoint defines it.
    """

    def __init__(self, session: Session, model: nn.Module, *, first_step: int = 0) -> None:
        self._session = session
        self._model = model
        self._first_step: int | None = first_step
        self._length = session.metadata.end_step - first_step

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Step]:
        return self._session.steps(self._model, first_step=self._first_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state for a checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the step saved in a checkpoint."""
        self._session.load_state_dict(state)
        self._first_step = None
