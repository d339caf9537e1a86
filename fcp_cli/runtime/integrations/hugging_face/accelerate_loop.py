"""Follow a plan in a plain loop around accelerate: its prepared loader gives the plan's micro-batches, one by one.

The script's `model(**batch).loss` is then this rank's share of the step's loss, and its optimizer, scheduler and
clipping act when the step's gradients are whole: accelerate asks for that itself (`sync_gradients`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.runtime.followed_step import plan_path
from fcp_cli.runtime.integrations.hugging_face.follow import base_model
from fcp_cli.runtime.integrations.hugging_face.rows import CollatedRows
from fcp_cli.runtime.integrations.hugging_face.sampler import PlanSampler
from fcp_cli.runtime.integrations.transformers import SwitchedAttention
from fcp_cli.runtime.integrations.transformers_loss import prepare_loss
from fcp_cli.runtime.session import LocalMicroBatch, Session, Step, start

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
        self.current: LocalMicroBatch | None = None
        self.model: nn.Module | None = None
        self._attention: SwitchedAttention | None = None
        self._on_rings = ExitStack()
        self._steps: Iterator[Step] | None = None
        self._rest: Iterator[LocalMicroBatch] | None = None
        self._loader: PlannedBatches | None = None
        self._rows: CollatedRows | None = None

    def adopt(self, model: nn.Module) -> bool:
        """Hook a model that is about to be prepared, if anything of it is trained; return whether it is.

        Raises:
            RunError: it cannot be followed, or is the second.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return False
        if self._attention is not None:
            raise RunError(
                "the script prepares a second model that is trained, whose gradients the plan does not sum; freeze it, "
                "or follow the plan in a loop of your own (docs/how-to/training-loop.md)"
            )
        base = base_model(model)
        self._attention = SwitchedAttention(base)
        prepare_loss(base)
        base.register_forward_pre_hook(self._complete_inputs, with_kwargs=True, prepend=True)
        base.register_forward_hook(self._share_loss)
        return True

    def planned(self, loader: Any) -> Any:
        """Return what stands for a prepared loader: the plan's micro-batches where its data is the manifest's."""
        rows = self.metadata.manifest.rows
        dataset: Any = getattr(loader, "dataset", None)
        if self._loader is not None or not hasattr(dataset, "__len__") or len(dataset) != rows:
            return loader
        size = self.metadata.global_batch_size
        updates = self.accelerator.gradient_accumulation_steps
        batch = loader.total_batch_size * updates
        if batch != size:
            raise RunError(
                f"the script trains on {batch} sequences a step ({loader.total_batch_size} over all ranks x "
                f"gradient_accumulation_steps {updates}), but the plan on {size}; plan with 'fcp plan "
                f"--global-batch-size {batch}', or give the script the plan's"
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
            (Path(folder) / _POSITION).write_text(json.dumps({"next_step": self.next_step}))

    def load(self, folder: Path) -> None:
        """Go on where a saved state ended."""
        path = folder / _POSITION
        if not path.is_file():
            raise RunError(f"{folder} holds no {_POSITION}: it was not saved under a plan; start from the beginning")
        self.next_step = int(json.loads(path.read_text())["next_step"])

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
        assert self._attention is not None
        self.current = microbatch
        self.accelerator.gradient_state._set_sync_gradients(microbatch.is_last)
        self._on_rings.enter_context(self._attention.on_rings())
        return _Batch(input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, labels=microbatch.labels)

    def _leave(self) -> None:
        self.current = None
        self._on_rings.close()

    def _complete_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        microbatch = self.current
        if microbatch is None or kwargs.get("input_ids") is not microbatch.input_ids:
            return None
        return args, {**kwargs, "position_ids": microbatch.position_ids, "attention_mask": None}

    def _share_loss(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put this rank's share of the step's loss where the script takes it; its mean over ranks is what is logged."""
        microbatch = self.current
        if microbatch is None or getattr(output, "loss", None) is None:
            return None
        share = microbatch.normalised(output.loss) * self.accelerator.gradient_accumulation_steps
        assert microbatch.loss_sum is not None
        # In value, not in gradient: what scripts log is a mean over ranks.
        unlogged = self.session.world.size / microbatch.loss_factor - 1
        return replace(output, loss=share + unlogged * share.detach())


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


class _Batch(dict[str, Tensor]):
    """A micro-batch; scripts that ask for the attention mask find none, which the plan stands for."""

    def __missing__(self, name: str) -> None:
        if name != "attention_mask":
            raise KeyError(name)
