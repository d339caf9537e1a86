"""Follows a plan in a hand-written training loop: its loader yields the plan's micro-batches one by one.

The script's `model(**batch).loss` becomes this rank's part of the step's loss. Gradients are summed over all ranks
after the backward pass of the step's last micro-batch, before the script's optimizer step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import check_global_batch
from fcp_cli.integrations.hugging_face.data.rows import CollatedRows
from fcp_cli.integrations.hugging_face.data.sampler import PlanSampler
from fcp_cli.integrations.hugging_face.job_facts import (
    LoopSettings,
    ZeroStage,
    facts_of,
    is_shuffled,
    recomputes,
    rows_of,
    start_session,
)
from fcp_cli.integrations.hugging_face.planned_model import PlannedModel
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step


class WrittenLoop(ABC):
    """Follows the plan in FCP_PLAN in one training loop.

    In a job launched without a plan, one is created when the loop's loader first yields batches.

    Args:
        device: device of this rank.

    Attributes:
        model: wrapped model, whose gradients are summed.
        planned: transformers model inside, once it is hooked.
        session: session, once the plan is followed.
    """

    NAME: ClassVar[str]
    """Name of the loop, for messages."""
    BACKWARD: ClassVar[str]
    """Call that runs the backward pass in scripts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model: nn.Module | None = None
        self.planned: PlannedModel | None = None
        self.session: Session | None = None
        self._next_step: int | None = None  # None: first step of the plan
        self._steps: Generator[Step, None, None] | None = None
        self._rest: Iterator[LocalMicroBatch] | None = None
        self._rows: CollatedRows | None = None
        self._trained: Any = None  # the training loader

    @abstractmethod
    def rows_per_pass(self, loader: Any) -> int:
        """Return the script's batch size per rank, in rows."""

    @abstractmethod
    def precision_and_sharding(self) -> tuple[bool, ZeroStage]:
        """Return `is_mixed` and `zero` of `LoopSettings`."""

    @property
    @abstractmethod
    def accumulates(self) -> int:
        """The script's gradient accumulation steps."""

    @property
    def metadata(self) -> PlanMetadata:
        assert self.session is not None
        return self.session.metadata

    @property
    def next_step(self) -> int:
        return self.metadata.first_step if self._next_step is None else self._next_step

    @property
    def current(self) -> LocalMicroBatch | None:
        return None if self.planned is None else self.planned.current

    def follow(self, loader: Any) -> None:
        """Use a loader's rows for the plan, creating the plan if the job has none."""
        if self._rows is not None:
            if loader.dataset is not self._trained.dataset:
                self._rows.require_same(loader)
            self._rows.require_lengths()
            return
        settings = self._settings(loader)
        assert self.planned is not None
        model = self.planned.model
        if self.session is None:
            self.session = start_session(
                loader, lambda: facts_of(settings, loader, model, self.device), device=self.device
            )
        self._rows = rows_of(self.session, loader)
        ranks = self.session.world.size
        check_global_batch(
            self.metadata,
            settings.rows_per_pass * settings.accumulates * ranks,
            f"{settings.rows_per_pass} x {ranks} ranks x gradient_accumulation_steps {settings.accumulates}",
        )
        self._trained = loader

    def _settings(self, loader: Any) -> LoopSettings:
        """Return the settings of the loop; its number of epochs is unknown."""
        rows_per_pass = self.rows_per_pass(loader)
        assert self.planned is not None
        is_mixed, zero = self.precision_and_sharding()
        return LoopSettings(
            loop=self.NAME,
            rows_per_pass=rows_per_pass,
            accumulates=self.accumulates,
            drops_last=bool(getattr(loader.batch_sampler, "drop_last", False)),
            shuffle=is_shuffled(loader),
            seed=torch.initial_seed() % 2**31,
            zero=zero,
            is_mixed=is_mixed,
            recomputes=recomputes(self.planned.model),
        )

    def epoch(self, loader: Any) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's micro-batches to the end of the plan's epoch."""
        self.follow(loader)
        assert self.session is not None
        end = self.metadata.end_step
        if self.next_step >= end:
            raise RunError(
                f"the plan {self.session.plan} ends after {end} steps, but the script trains on; plan more with "
                "'fcp plan --epochs'"
            )
        per_epoch = self.metadata.steps_per_epoch
        last = min(end, (self.next_step // per_epoch + 1) * per_epoch)
        if self._steps is None:
            assert self._rows is not None and self.planned is not None
            self.planned.recompute_by(self.session.recompute_levels)
            self.session.fetch = self._rows.ahead(PlanSampler(self.session, first_step=self.next_step))
            self._steps = self.session.steps(self.model, first_step=self.next_step)
        assert self._steps is not None
        while self.next_step < last:
            step = next(self._steps)
            self._rest = iter(step)
            while (microbatch := next(self._rest, None)) is not None:
                yield self.enter(microbatch)
                if microbatch.is_last and self.current is not None:
                    raise RunError(
                        f"step {step.index}: the script did not call {self.BACKWARD}(loss) for the last "
                        "micro-batch, after which the gradients of all ranks are summed"
                    )
                if microbatch.is_last:
                    break
                self._leave()
        if self.next_step >= end:
            self._steps.close()  # writes the metrics of the last step
        elif self.session.recorder is not None:  # this may be the loop's last epoch; only the script knows
            self.session.recorder.end()
            self.session.recorder.flush()

    def require_microbatch(self) -> None:
        """Raise RunError outside of planned micro-batches, in which gradients would not be summed over ranks."""
        if self.current is None:
            raise RunError(
                f"the script calls {self.BACKWARD} on a batch that is none of the plan's: one of a loader that "
                "was not prepared, one that was read before model.train(), or a second backward after a step's last"
            )

    def after_backward(self) -> None:
        """Sum gradients over all ranks after the backward pass of a step's last micro-batch."""
        if self.current is not None and self.current.is_last and self._rest is not None:
            rest = next(self._rest, None)
            assert rest is None
            self._leave()
            self._next_step = self.next_step + 1

    def enter(self, microbatch: LocalMicroBatch, *, divided_by: int = 1) -> dict[str, Tensor]:
        """Return a micro-batch as the script's loader would.

        Args:
            microbatch: micro-batch of the plan.
            divided_by: factor by which the framework divides the loss for gradient accumulation; undone by the model.
        """
        assert self.planned is not None and self.session is not None
        # Scripts log the mean over ranks and over accumulated batches.
        shown = self.session.world.size * self.accumulates
        return self.planned.enter(microbatch, divided_by=divided_by, shown=shown)

    def close(self) -> None:
        """Stop following the plan; the loop requests no more steps."""
        if self._steps is not None:
            self._steps.close()

    def _leave(self) -> None:
        assert self.planned is not None
        self.planned.leave()
