"""Follows a plan in a hand-written training loop: its loader yields the plan's micro-batches one by one.

The script's `model(**batch).loss` becomes this rank's part of the step's loss. Gradients are summed over all ranks
after the backward pass of the step's last micro-batch, before the script's optimizer step.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import check_global_batch
from fcp_cli.integrations.hugging_face.data import CollatedRows, PlanSampler
from fcp_cli.integrations.hugging_face.job_facts import (
    LoopSettings,
    ZeroStage,
    facts_of,
    fsdp_stage,
    is_shuffled,
    recomputes,
    rows_of,
    start_session,
)
from fcp_cli.integrations.transformers.loss import prepare_loss
from fcp_cli.integrations.transformers.preparation import SwitchedAttention, base_model, recompute_layers
from fcp_cli.plan.metadata import PlanMetadata, is_launched_without_plan
from fcp_cli.runtime.session import Session, start
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.util.files import write_text_atomically
from fcp_cli.util.inputs import read_object


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
        assert self.session is not None and self.planned is not None
        end = self.metadata.end_step
        if self.next_step >= end:
            raise RunError(
                f"the plan {self.session.plan} ends after {end} steps, but the script trains on; plan more with "
                "--epochs"
            )
        per_epoch = self.metadata.steps_per_epoch
        last = min(end, (self.next_step // per_epoch + 1) * per_epoch)
        if self._steps is None:
            assert self._rows is not None
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
                self.planned.leave()
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
        if self.planned is not None and self.current is not None and self.current.is_last and self._rest is not None:
            rest = next(self._rest, None)
            assert rest is None
            self.planned.leave()
            self._next_step = self.next_step + 1

    def enter(self, microbatch: LocalMicroBatch, *, divided_by: int = 1) -> dict[str, Tensor]:
        """Return a micro-batch as the script's loader would; `divided_by` is that of `PlannedModel.enter`."""
        assert self.planned is not None and self.session is not None
        # Scripts log the mean over ranks and over accumulated batches.
        shown = self.session.world.size * self.accumulates
        return self.planned.enter(microbatch, divided_by=divided_by, shown=shown)

    def close(self) -> None:
        """Stop following the plan; the loop requests no more steps."""
        if self._steps is not None:
            self._steps.close()


class PlannedModel:
    """A model trained by the script's own `model(**batch).loss`, hooked before it is wrapped by DDP etc.

    Args:
        model: transformers model, possibly with PEFT adapters.

    Attributes:
        model: the model, as given.
        current: micro-batch being processed; None between micro-batches.
    """

    def __init__(self, model: nn.Module) -> None:
        base, self.model = base_model(model), model
        self.current: LocalMicroBatch | None = None
        self._divided_by = self._shown = 1.0
        self._attention = SwitchedAttention(base)
        self._on_rings = ExitStack()
        prepare_loss(base)
        self._hooks = (
            base.register_forward_pre_hook(self._complete_inputs, with_kwargs=True, prepend=True),
            base.register_forward_hook(self._share_loss),
        )

    def enter(self, microbatch: LocalMicroBatch, *, divided_by: float, shown: float) -> dict[str, Tensor]:
        """Return a micro-batch as the script's loader would; the model runs on its ring until `leave`.

        Args:
            microbatch: micro-batch of the plan.
            divided_by: factor by which the framework divides the loss for gradient accumulation; undone here.
            shown: factor on this rank's part of the step's loss in the value that the script sees, e.g. logs.
        """
        self.current, self._divided_by, self._shown = microbatch, divided_by, shown
        self._on_rings.enter_context(self._attention.on_rings())
        return _PlannedBatch(
            input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, labels=microbatch.labels
        )

    def leave(self) -> None:
        """Restore the model's own attention and loss."""
        self.current = None
        self._on_rings.close()

    def recompute_by(self, levels: Sequence[RecomputeLevel]) -> None:
        """Recompute layers as needed if the plan has recompute levels, overriding the script's checkpointing."""
        if levels:
            recompute_layers(base_model(self.model), "as-needed", levels)

    def release(self) -> None:
        """Remove the hooks, so that the same model can be trained again."""
        self.leave()
        for hook in self._hooks:
            hook.remove()

    def _complete_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        microbatch = self.current
        given = args[0] if args else kwargs.get("input_ids")
        if microbatch is None or given is not microbatch.input_ids or len(args) > 2:  # tokens, mask may be positional
            return None
        return args[:1], {**kwargs, "position_ids": microbatch.position_ids, "attention_mask": None}

    def _share_loss(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Replace the loss: its gradient is that of this rank's part of the step's loss, its value is for display."""
        microbatch = self.current
        if microbatch is None or getattr(output, "loss", None) is None:
            return None
        share = microbatch.normalised(output.loss)
        trained, shown = share * self._divided_by, share.detach() * (self._shown / microbatch.loss_factor)
        return replace(output, loss=trained + (shown - trained.detach()))


class _PlannedBatch(dict[str, Tensor]):
    """A micro-batch without attention mask, since the plan defines attention."""

    def __missing__(self, name: str) -> None:
        if name != "attention_mask":
            raise KeyError(name)


# A plain accelerate loop: its optimizer, scheduler and clipping take effect once the step's gradients are complete, as
# signalled by accelerate's `sync_gradients`.

_POSITION = "fcp_step.json"
_LOSSES_SHOWN = (
    "fcp: the loss of a micro-batch is this rank's share of the step's, exact for backward: its sum over a step, "
    "divided by gradient_accumulation_steps and averaged over ranks, is the mean over the step's tokens, as in the "
    "run's metrics"
)


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

    def follow(self, loader: Any) -> None:
        is_first = self._rows is None
        super().follow(loader)
        if is_first and self.accelerator.is_main_process:
            print(_LOSSES_SHOWN, file=sys.stderr, flush=True)

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
