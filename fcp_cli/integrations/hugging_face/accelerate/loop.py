"""Follow a plan in a plain loop around accelerate: its prepared loader gives the plan's micro-batches, one by one.

The script's `model(**batch).loss` is then this rank's share of the step's loss, and its optimizer, scheduler and
clipping act when the step's gradients are whole: accelerate asks for that itself (`sync_gradients`).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.integrations.hugging_face.checks import check_global_batch
from fcp_cli.integrations.hugging_face.data.rows import CollatedRows
from fcp_cli.integrations.hugging_face.data.sampler import PlanSampler
from fcp_cli.integrations.hugging_face.planned_model import PlannedModel
from fcp_cli.reading.documents import read_object
from fcp_cli.runtime.data.followed_step import plan_path
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.start import start
from fcp_cli.runtime.session.step import Step

_POSITION = "fcp_step.json"


class AcceleratedLoop:
    """One `Accelerator`'s way through the plan in FCP_PLAN. Every rank makes it, at the first call of `prepare`.

    Raises:
        FcpError: the plan cannot be followed.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.session: Session = start(plan_path(None), device=accelerator.device)
        self.metadata = self.session.metadata
        self.next_step = self.metadata.first_step
        self.model: nn.Module | None = None
        self._planned: PlannedModel | None = None
        self._steps: Generator[Step, None, None] | None = None
        self._rest: Iterator[LocalMicroBatch] | None = None
        self._loader: PlannedBatches | None = None
        self._rows: CollatedRows | None = None

    @property
    def current(self) -> LocalMicroBatch | None:
        return None if self._planned is None else self._planned.current

    def adopt(self, model: nn.Module) -> bool:
        """Hook a model that is about to be prepared, if anything of it is trained; return whether it is.

        Raises:
            RunError: it cannot be followed, or is the second.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return False
        if self._planned is not None:
            raise RunError(
                "the script prepares a second model that is trained, whose gradients the plan does not sum; freeze it, "
                "or follow the plan in a loop of your own (docs/how-to/training-loop.md)"
            )
        self._planned = PlannedModel(model)
        return True

    def planned(self, loader: Any) -> Any:
        """Return what stands for a prepared loader: the plan's micro-batches where its data is the manifest's."""
        rows = self.metadata.manifest.rows
        dataset: Any = getattr(loader, "dataset", None)
        if self._loader is not None or not hasattr(dataset, "__len__") or len(dataset) != rows:
            return loader
        updates = self.accelerator.gradient_accumulation_steps
        check_global_batch(
            self.metadata,
            loader.total_batch_size * updates,
            f"{loader.total_batch_size} over all ranks x gradient_accumulation_steps {updates}",
        )
        self._rows = CollatedRows(loader, self.session.plan, self.metadata)
        self._loader = PlannedBatches(self, loader)
        return self._loader

    def epoch(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's micro-batches until the plan's epoch ends.

        Raises:
            RunError: the plan has ended; the loop left something out.
        """
        end = self.metadata.end_step
        if self.next_step >= end:
            raise RunError(
                f"the plan {self.session.plan} ends after {end} steps, but the script trains on; plan more with "
                "'fcp plan --epochs'"
            )
        per_epoch = self.metadata.steps_per_epoch
        last = min(end, (self.next_step // per_epoch + 1) * per_epoch)
        if self._steps is None and self._rows is not None:
            self.session.fetch = self._rows.ahead(PlanSampler(self.session, first_step=self.next_step))
            self._steps = self.session.steps(self.model, first_step=self.next_step)
        assert self._steps is not None
        while self.next_step < last:
            step = next(self._steps)
            self._rest = iter(step)
            while (microbatch := next(self._rest, None)) is not None:
                yield self._enter(microbatch)
                if microbatch.is_last and self.current is not None:
                    raise RunError(
                        f"step {step.index}: the script did not call accelerator.backward(loss) for the last "
                        "micro-batch, after which the gradients of all ranks are summed"
                    )
                if microbatch.is_last:
                    break
                self._leave()
        if self.next_step >= end:
            self._steps.close()  # which writes the metrics of the last step

    def after_backward(self) -> None:
        """Sum the gradients of all ranks once the backward of a step's last micro-batch has run."""
        if self.current is not None and self.current.is_last and self._rest is not None:
            rest = next(self._rest, None)
            assert rest is None
            self._leave()
            self.next_step += 1

    def is_accumulating(self) -> bool:
        """Return whether the step's gradients are not whole yet."""
        return self.current is not None

    def require_whole_step(self, what: str) -> None:
        """Raise RunError where ranks that have other numbers of micro-batches would not meet."""
        if self.current is not None and self.metadata.sync == "iteration":
            raise RunError(
                f"the script calls accelerator.{what} before a step's last backward, but under sync iteration ranks "
                "have different numbers of micro-batches and would wait for each other; call it where "
                "accelerator.sync_gradients, or plan with 'fcp plan --sync microbatch'"
            )

    def save(self, folder: Any) -> None:
        """Write the next step of the plan beside what accelerate saved."""
        if self.accelerator.is_main_process and folder is not None:
            write_text_atomically(Path(folder) / _POSITION, json.dumps({"next_step": self.next_step}))

    def load(self, folder: Path) -> None:
        """Go on where a saved state ended."""
        path = folder / _POSITION
        if not path.is_file():
            raise RunError(f"{folder} holds no {_POSITION}: it was not saved under a plan; start from the beginning")
        self.next_step = int(read_object(path, error=RunError)["next_step"])

    def check_skipped(self, num_batches: int) -> None:
        """Raise RunError where a resumed script skips to another step than the one that its state was saved before."""
        updates, rest = divmod(num_batches, self.accelerator.gradient_accumulation_steps)
        place = self.next_step % self.metadata.steps_per_epoch
        if rest or updates != place:
            raise RunError(
                f"the script skips {num_batches} batches, {updates} steps of an epoch, but the plan goes on at step "
                f"{place} of its epoch; load the state that was saved there with accelerator.load_state(folder)"
            )

    def _enter(self, microbatch: LocalMicroBatch) -> dict[str, Tensor]:
        assert self._planned is not None
        self.accelerator.gradient_state._set_sync_gradients(microbatch.is_last)
        updates = self.accelerator.gradient_accumulation_steps
        # What scripts log is a mean over ranks, and over the batches that they accumulate.
        return self._planned.enter(microbatch, divided_by=updates, shown=self.session.world.size * updates)

    def _leave(self) -> None:
        assert self._planned is not None
        self._planned.leave()


class PlannedBatches:
    """A prepared loader whose batches are the plan's while the model trains, and its own elsewhere."""

    def __init__(self, loop: AcceleratedLoop, loader: Any) -> None:
        self._loop = loop
        self._loader = loader

    def __len__(self) -> int:
        """Return the batches of an epoch as the script counts them: updates x accumulated batches."""
        return self._loop.metadata.steps_per_epoch * int(self._loop.accelerator.gradient_accumulation_steps)

    def __iter__(self) -> Iterator[Any]:
        model = self._loop.model
        if model is None or not model.training or not torch.is_grad_enabled():
            return iter(self._loader)
        return self._loop.epoch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
