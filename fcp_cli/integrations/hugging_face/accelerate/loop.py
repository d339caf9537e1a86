"""Follows a plan in a plain accelerate loop: its prepared loader yields the plan's micro-batches one by one.

The script's `model(**batch).loss` becomes this rank's part of the step's loss. Its optimizer, scheduler and clipping
take effect once the step's gradients are complete, as signalled by accelerate's `sync_gradients`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.integrations.hugging_face.job_facts import ZeroStage, fsdp_stage
from fcp_cli.integrations.hugging_face.planned_model import PlannedModel
from fcp_cli.integrations.hugging_face.written_loop import WrittenLoop
from fcp_cli.plan.metadata.job_facts import is_launched_without_plan
from fcp_cli.reading.documents import read_object
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.start import start

_POSITION = "fcp_step.json"


class AcceleratedLoop(WrittenLoop):
    """Follows the plan with one `Accelerator`. Created on every rank by the first call of `prepare`.

    In a job launched without a plan, one is created when the first prepared loader yields batches to a model in
    training mode.
    """

    NAME = "a loop around accelerate"
    BACKWARD = "accelerator.backward"

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator.device)
        self.accelerator = accelerator
        if not is_launched_without_plan():
            self.session = start(device=accelerator.device)

    @property
    def accumulates(self) -> int:
        return int(self.accelerator.gradient_accumulation_steps)

    def adopt(self, model: nn.Module) -> bool:
        """Hook a model before it is prepared if it has trainable weights; return whether it was hooked."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return False
        if self.planned is not None:
            raise RunError(
                "the script prepares a second model that is trained, whose gradients the plan does not sum; freeze it, "
                "or follow the plan in a loop of your own (docs/how-to/training-loop.md)"
            )
        self.planned = PlannedModel(model)
        return True

    def rows_per_pass(self, loader: Any) -> int:
        if self.planned is None:
            raise RunError("the script has accelerator.prepare no model that is trained before it takes batches")
        return int(loader.total_batch_size // self.accelerator.num_processes)

    def precision_and_sharding(self) -> tuple[bool, ZeroStage]:
        return self.accelerator.mixed_precision in ("bf16", "fp16"), fsdp_stage(self.accelerator)

    def is_accumulating(self) -> bool:
        """Return whether the step's gradients are still incomplete."""
        return self.current is not None

    def require_whole_step(self, what: str) -> None:
        """Raise RunError if ranks with different numbers of micro-batches would deadlock."""
        if self.current is not None and self.metadata.sync == "iteration":
            raise RunError(
                f"the script calls accelerator.{what} before a step's last backward, but under sync iteration ranks "
                "have different numbers of micro-batches and would wait for each other; call it where "
                "accelerator.sync_gradients, or plan with 'fcp plan --sync microbatch'"
            )

    def save(self, folder: Any) -> None:
        """Save the plan's next step in accelerate's checkpoint folder."""
        if self.accelerator.is_main_process and folder is not None:
            write_text_atomically(Path(folder) / _POSITION, json.dumps({"next_step": self.next_step}))

    def load(self, folder: Path) -> None:
        """Resume at the step of a saved checkpoint."""
        path = folder / _POSITION
        if not path.is_file():
            raise RunError(f"{folder} holds no {_POSITION}: it was not saved under a plan; start from the beginning")
        self._next_step = int(read_object(path, error=RunError)["next_step"])

    def check_skipped(self, loader: Any, num_batches: int) -> None:
        """Raise RunError unless a resumed script skips to the step at which its checkpoint was saved."""
        self.follow(loader)
        updates, rest = divmod(num_batches, self.accelerator.gradient_accumulation_steps)
        place = self.next_step % self.metadata.steps_per_epoch
        if rest or updates != place:
            raise RunError(
                f"the script skips {num_batches} batches, {updates} steps of an epoch, but the plan continues at step "
                f"{place} of its epoch; load the state that was saved there with accelerator.load_state(folder)"
            )

    def enter(self, microbatch: LocalMicroBatch, *, divided_by: int = 1) -> dict[str, Tensor]:
        self.accelerator.gradient_state._set_sync_gradients(microbatch.is_last)
        return super().enter(microbatch, divided_by=divided_by * self.accumulates)  # `backward` divides by it


class PlannedBatches:
    """A prepared loader that yields the plan's micro-batches while the model trains, and its own batches otherwise."""

    def __init__(self, loop: AcceleratedLoop, loader: Any) -> None:
        self._loop = loop
        self.own = loader

    def __len__(self) -> int:
        """Return the batches per epoch as the script counts them: updates x accumulated batches."""
        session = self._loop.session
        if session is None or len(self.own.dataset) != session.metadata.manifest.rows:
            return len(self.own)
        return session.metadata.steps_per_epoch * int(self._loop.accelerator.gradient_accumulation_steps)

    def __iter__(self) -> Iterator[Any]:
        model = self._loop.model
        if model is None or not model.training or not torch.is_grad_enabled():
            return iter(self.own)
        return self._loop.epoch(self.own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)
