"""Provides the steps of a plan as a data loader for Lightning's Trainer.

    class Model(lightning.LightningModule):
        automatic_optimization = False

        def train_dataloader(self):
            return PlannedSteps(fcp.start(fetch=tokens_of), self.trainer.strategy.model)

        def training_step(self, step, _):
            for batch in step:
                self.manual_backward(batch.loss(self.model(batch.input_ids, batch.position_ids)))
            self.optimizers().step()
            self.optimizers().zero_grad()

Lightning itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step


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
