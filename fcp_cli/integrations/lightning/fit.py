"""Follows a plan in one `Trainer.fit` of Lightning.

Each optimizer step runs the plan's micro-batches through the module's own `training_step`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Refusals, refuse
from fcp_cli.integrations.hugging_face.checks import check_global_batch, check_steps
from fcp_cli.integrations.hugging_face.data import PlanSampler
from fcp_cli.integrations.hugging_face.job_facts import (
    LoopSettings,
    facts_of,
    is_shuffled,
    recomputes,
    rows_of,
    start_session,
)
from fcp_cli.integrations.hugging_face.loops import PlannedModel
from fcp_cli.plan.metadata import JobFacts
from fcp_cli.runs.run_dir import StoppedScript, note_stopped
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import Step
from fcp_cli.runtime.stop_request import INTERRUPTED, StopRequest

_STRATEGIES = ("DDPStrategy", "SingleDeviceStrategy")


class LightningFit:
    """Follows the plan in FCP_PLAN in one call of `Trainer.fit`. Created on every rank, with its training loader.

    The trainer's count of optimizer steps is the plan's step, so resuming (`ckpt_path=`), schedules, callbacks and logs
    work unchanged.

    Args:
        trainer: Lightning trainer whose module uses automatic optimization.
        loader: the script's training loader, whose data set, collator and number of workers are used.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        refuse(_refusals(trainer, loader))
        self._trainer, self._module = trainer, trainer.lightning_module
        self._batch_size = int(loader.batch_sampler.batch_size)
        self._model = PlannedModel(_trained_model(self._module))
        self._loader, device = loader, trainer.strategy.root_device
        shuffle = is_shuffled(loader)
        self.session: Session = start_session(loader, lambda: self._facts(shuffle, device), device=device)
        metadata = self.session.metadata
        updates, ranks = trainer.accumulate_grad_batches, self.session.world.size
        check_global_batch(
            metadata,
            self._batch_size * updates * ranks,
            f"batch_size {self._batch_size} x accumulate_grad_batches {updates} x {ranks} ranks",
        )
        _check_length(trainer, self.session)
        self._rows = rows_of(self.session, loader)
        self._steps: Generator[Step, None, None] | None = None
        self._stop, self._finished = StopRequest().install(), trainer.global_step
        callbacks = import_module(f"{type(trainer.fit_loop).__module__.partition('.loops')[0]}.callbacks")
        self._at_batch_end = callbacks.LambdaCallback(on_train_batch_end=self._stop_if_asked)
        trainer.callbacks.append(self._at_batch_end)

    def _facts(self, shuffle: bool, device: torch.device) -> JobFacts:
        trainer, model, loader = self._trainer, self._model.model, self._loader
        epochs, steps = trainer.max_epochs, trainer.max_steps
        settings = LoopSettings(
            loop=type(self._module).__name__,
            rows_per_pass=self._batch_size,
            accumulates=trainer.accumulate_grad_batches,
            epochs=None if epochs is None or epochs < 0 else epochs,
            max_steps=None if steps is None or steps < 0 else steps,
            drops_last=bool(loader.batch_sampler.drop_last),
            shuffle=shuffle,
            seed=torch.initial_seed() % 2**31,
            is_mixed=str(trainer.precision).endswith("-mixed"),
            recomputes=recomputes(model),
        )
        return facts_of(settings, loader, model, device)

    def follow(self, loader: Any) -> None:
        """Continue with a loader that the script recreates for an epoch, if its rows are the same."""
        if loader.dataset is not self._loader.dataset:
            self._rows.require_same(loader)

    def loader(self) -> CountedBatches:
        """Return a replacement for the script's loader, with as many batches as the trainer accumulates in an epoch."""
        updates = self.session.metadata.steps_per_epoch * self._trainer.accumulate_grad_batches
        return CountedBatches(self.session, updates, self._batch_size)

    def begin(self) -> None:
        """Start following the plan before the first optimizer step."""
        if self._steps is None:
            first = self._trainer.global_step
            self._model.recompute_by(self.session.recompute_levels)
            self.session.fetch = self._rows.ahead(PlanSampler(self.session, first_step=first))
            self._steps = self.session.steps(self._trainer.strategy.model, first_step=first)

    def nothing(self) -> Tensor:
        """Return a zero loss (0-d) for accumulated batches before the last one, which runs the plan's step."""
        return torch.zeros((), device=self.session.device)

    def run(
        self, training_step: Callable[[Any], Any], backward: Callable[[Tensor], None] | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the plan's next step: the module's `training_step` and a backward pass for each micro-batch.

        Returns:
            A loss (0-d) whose mean over ranks is the step's, and the other results of the last `training_step`.
        """
        step = self._next()
        shown = float(len(step) * self.session.world.size)
        losses: list[Tensor] = []
        found: Any = None
        for microbatch in step:
            batch = self._model.enter(microbatch, divided_by=self._trainer.accumulate_grad_batches, shown=shown)
            try:
                with _logged_once(self._module, len(losses), len(step)):
                    found = training_step(batch)
                if found.closure_loss is None:
                    raise RunError(f"step {step.index}: training_step returned no loss, which a plan's step needs")
                if backward is not None:
                    backward(found.closure_loss)
            finally:
                self._model.leave()
            losses.append(found.closure_loss.detach())
        assert found is not None
        return torch.stack(losses).mean(), found.extra

    def close(self) -> None:
        """Stop following the plan and restore the module's own attention."""
        self._stop.release()
        self._trainer.callbacks.remove(self._at_batch_end)
        if self._steps is not None:
            self._steps.close()
        self._model.release()
        self.session.close()

    def _stop_if_asked(self, trainer: Any, *_: Any) -> None:
        """Save `last.ckpt`, which `ckpt_path="last"` finds, and exit, after the step in which any rank was asked to."""
        if trainer.global_step == self._finished or not self._stop.agreed(self.session.world):
            return  # accumulated batches are no step
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        checkpoint = Path(folder).absolute() / "last.ckpt"
        trainer.save_checkpoint(checkpoint)  # on all ranks, which wait for each other
        run_dir = os.environ.get("FCP_RUN_DIR")
        if run_dir and self.session.rank == 0:
            note_stopped(Path(run_dir), StoppedScript(checkpoint=str(checkpoint), step=trainer.global_step))
        raise SystemExit(INTERRUPTED)

    def _next(self) -> Step:
        wanted = self._trainer.global_step
        assert self._steps is not None
        if wanted % self.session.metadata.steps_per_epoch == 0:
            self._rows.require_lengths()
        step = next(self._steps, None)
        if step is None or step.index != wanted:
            place = "has ended" if step is None else f"is at step {step.index}"
            raise RunError(
                f"the trainer is at step {wanted}, but the plan {self.session.plan} {place}; an optimizer step runs "
                "one step of the plan, so its closure is called once"
            )
        return step


class CountedBatches:
    """Empty batches for Lightning to count; the steps themselves fetch the rows. Its state is saved in checkpoints."""

    def __init__(self, session: Session, batches: int, batch_size: int) -> None:
        self._session, self._batches, self._batch_size = session, batches, batch_size

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self._batches):  # Lightning weighs logs by the first dimension
            yield {"input_ids": torch.zeros((self._batch_size, 0), dtype=torch.int64, device="cpu")}

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state; without a state, Lightning warns about resuming within an epoch."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved step."""
        self._session.load_state_dict(state)


@contextmanager
def _logged_once(module: Any, position: int, microbatches: int) -> Iterator[None]:
    """Collect a module's logs over micro-batches and log their mean at the last, as one batch for Lightning."""
    kept: dict[str, list[Any]] = vars(module).setdefault("_fcp_logged", {})
    own = module.log

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, (Tensor, int, float)):
            kept.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else float(value))
            if position == microbatches - 1:
                values = kept[name]
                own(name, sum(values) / len(values), *args, **kwargs)
        elif position == microbatches - 1:
            own(name, value, *args, **kwargs)

    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
        if position == microbatches - 1:
            del vars(module)["_fcp_logged"]


def _trained_model(module: nn.Module) -> nn.Module:
    """Return a module's transformers model with its adapters; raise RunError if other weights are trainable."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    found = [part for part in models if any(parameter.requires_grad for parameter in part.parameters())]
    if not found:
        raise RunError(
            f"{type(module).__name__} trains no model of transformers, whose attention a plan could put on its rings; "
            "optimise by hand with PlannedSteps, or write a loop on Fabric (docs/how-to/training-loop.md)"
        )
    inside = {id(parameter) for parameter in found[0].parameters()}
    outside = [name for name, parameter in trained if id(parameter) not in inside]
    if outside:
        raise RunError(
            f"{type(module).__name__} trains {outside[0]} outside its {type(found[0]).__name__}, which a rank's part "
            "of a sequence would train wrong; freeze it, or optimise by hand with PlannedSteps "
            "(docs/how-to/training-loop.md)"
        )
    wrapped: Iterator[Any] = (part for part in module.modules() if hasattr(part, "get_base_model"))
    return next((part for part in wrapped if part.get_base_model() is found[0]), found[0])


def _refusals(trainer: Any, loader: Any) -> Refusals:
    strategy = type(trainer.strategy).__name__
    yield (
        strategy not in _STRATEGIES,
        f"the trainer's strategy is {strategy}, with which automatic optimisation cannot follow a plan; use "
        "strategy='ddp', or a loop on Fabric (docs/how-to/training-loop.md)",
    )
    limited = trainer.limit_train_batches not in (1.0, None) or trainer.overfit_batches
    yield bool(limited), "limit_train_batches and overfit_batches skip rows that the plan has; remove them"
    is_loader = hasattr(loader, "dataset") and hasattr(loader, "collate_fn")
    yield (
        not is_loader or not getattr(getattr(loader, "batch_sampler", None), "batch_size", None),
        f"the training data comes from a {type(loader).__name__} without batch_size, but a plan needs rows by number "
        "and how many are a batch: give the trainer one torch.utils.data.DataLoader with a batch_size",
    )


def _check_length(trainer: Any, session: Session) -> None:
    metadata = session.metadata
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if steps is not None and steps >= 0:
        by_epochs = math.inf if epochs in (None, -1) else epochs * metadata.steps_per_epoch
        check_steps(metadata, session.plan, int(min(steps, by_epochs)), f"max_steps {steps}")
    elif epochs is not None and epochs >= 0:
        check_steps(metadata, session.plan, epochs * metadata.steps_per_epoch, f"max_epochs {epochs}")
