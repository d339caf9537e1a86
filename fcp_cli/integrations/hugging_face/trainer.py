"""Follows a plan in a Trainer, hooked under `fcp launch` or with the mixin `FollowsPlan`, and stops it on Ctrl-C.

The Trainer's loader counts the plan's steps, and each optimizer step runs one of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import (
    WatchedMethods,
    check_one_data_set,
    check_schedule,
    check_trainer,
    check_trl,
    find_override,
    loss_class,
    loss_function_of,
    loss_kind,
    rows_per_pass,
    visits_in_order,
)
from fcp_cli.integrations.hugging_face.data import CollatedRows, PlanSampler
from fcp_cli.integrations.hugging_face.job_facts import facts_of, rows_of, start_session, trainer_settings
from fcp_cli.integrations.hugging_face.losses import BatchMeans, CausalLoss, PlannedLoss
from fcp_cli.integrations.hugging_face.own_loss import OwnLoss
from fcp_cli.integrations.hugging_face.pairs import LogitPreferenceLoss, PreferenceLoss, SftLoss
from fcp_cli.integrations.transformers.preparation import SwitchedAttention, base_model, recompute_layers
from fcp_cli.runs.run_dir import RunPaths, StoppedScript, forget_stopped, note_stopped, read_stopped
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import Step
from fcp_cli.runtime.stop_request import INTERRUPTED, StopRequest

RUN_DIR_VARIABLE = "FCP_RUN_DIR"
_RANDOM = (
    ", at random: batches are others than without a plan; curves overlay with train_sampling_strategy='sequential'"
)

_TOKEN_MEANS = "; entropy, logits and mean_token_accuracy are means over a step's answer tokens, not over its batches'"


class TrainerFollower:
    """Follows the plan in one call of `Trainer.train`. Created on every rank, before the model is wrapped.

    The trainer's global step is the plan's step, so the Trainer's own resuming, callbacks, schedules, logs and
    checkpoints work unchanged.

    Args:
        trainer: a `transformers.Trainer`.
        plan: plan file; defaults to FCP_PLAN.
    """

    def __init__(self, trainer: Any, plan: Path | None = None) -> None:
        check_trainer(trainer)
        check_one_data_set(trainer)
        self._trainer = trainer
        model, kind = base_model(trainer.model), loss_kind(trainer)
        loader = trainer.get_train_dataloader()  # its data set, collator and number of workers are used
        device, pairs, in_order = trainer.args.device, kind == "DPOTrainer", visits_in_order(trainer, loader)
        self.session = start_session(
            loader,
            lambda: facts_of(trainer_settings(trainer, kind, in_order=in_order), loader, trainer.model, device),
            device=device,
            pairs=pairs,
            plan=plan,
            config=model.config,
        )
        metadata = self.session.metadata
        self._rows = rows_of(self.session, loader, pairs=pairs, config=model.config)
        check_schedule(trainer, metadata, self.session.plan, self._rows.lengths, in_order=in_order)
        reference = getattr(trainer, "ref_model", None)
        models = (model,) if reference is None else (model, base_model(trainer.accelerator.unwrap_model(reference)))
        self._base = model
        self._attentions = [SwitchedAttention(one) for one in models]
        planned = _planned_loss(trainer, kind, models, self.session, self._rows)
        self._loss = _own_loss(trainer, self._attentions, self._rows, planned)
        self._watched = WatchedMethods(trainer, self.loader)
        self._steps: Generator[Step, None, None] | None = None
        self.stop = StopAtStepEnd(trainer, self.session)

    def loader(self) -> DataLoader[int]:
        """Return a replacement for the script's loader, with as many batches as the trainer accumulates in an epoch."""
        metadata = self.session.metadata
        args = self._trainer.args
        updates = metadata.steps_per_epoch * args.gradient_accumulation_steps
        # transformers warns if it has no tokens to count; a step of the script's own must fail on a batch without them.
        counts = getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False)
        nothing = torch.zeros((1, 0), dtype=torch.int64, device="cpu")
        empty = dict.fromkeys(("input_ids", "attention_mask"), nothing) if counts else {}
        # The trainer only counts rows and batches; the session fetches their contents.
        rows: Any = range(metadata.manifest.rows)
        return DataLoader(rows, batch_sampler=[[0]] * updates, collate_fn=lambda _: dict(empty))

    def run(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Run a plan step at the last accumulated batch before an optimizer step; do nothing at the others.

        Returns:
            A scalar (0-d) whose mean over ranks is the step's loss, which the trainer accumulates for its log.
        """
        trainer = self._trainer
        if not trainer.accelerator.sync_gradients:
            return self._answer(torch.zeros((), device=self.session.device))
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        step = self._next(model)
        self._loss.begin_step(step)
        with ExitStack() as stack:
            for attention in self._attentions:
                stack.enter_context(attention.on_rings())
            for microbatch in step:
                with trainer.compute_loss_context_manager():
                    loss = self._loss.of(model, microbatch)
                trainer.accelerator.backward(loss * trainer.accelerator.gradient_accumulation_steps)
        self._loss.end_step(self.session, step)
        self._count_tokens(inputs, step)
        return self._answer(step.local_loss() * self.session.world.size)

    def leave(self) -> None:
        """Close the iterator over steps, which finishes writing metrics and the plan."""
        if self._steps is not None:
            self._steps.close()

    def close(self) -> None:
        """Stop following the plan and restore the model's own attention."""
        self.stop.release()
        self.leave()
        self._watched.release()
        if isinstance(self._loss, OwnLoss):
            self._loss.close()
        self.session.close()

    def _answer(self, loss: Tensor) -> Tensor:
        self._watched.answers.append(loss)
        return loss

    def _next(self, model: nn.Module) -> Step:
        wanted = self._trainer.state.global_step
        if self._steps is None:
            self._announce(wanted)
            if self.session.recompute_levels:  # overrides the script's activation checkpointing
                recompute_layers(self._base, "as-needed", self.session.recompute_levels)
            self.session.fetch = self._rows.ahead(PlanSampler(self.session, first_step=wanted))
            self._steps = self.session.steps(model, first_step=wanted, mean_over=self._loss.mean_over)
        elif wanted % self.session.metadata.steps_per_epoch == 0:
            self._rows.require_lengths()
        step = next(self._steps, None)
        if step is None:
            raise RunError(
                f"the plan {self.session.plan} ends after {self.session.metadata.end_step} steps, but the script "
                "trains on; plan more with --epochs"
            )
        if step.index != wanted:
            raise RunError(f"the trainer is at step {wanted}, but the plan at {step.index}")
        return step

    def _announce(self, first_step: int) -> None:
        if self.session.rank == 0:
            metadata, trainer = self.session.metadata, self._trainer
            accumulates = trainer.args.gradient_accumulation_steps > 1
            means = _TOKEN_MEANS if accumulates and type(self._loss) is PreferenceLoss else ""
            known = f"plan hash {metadata.plan_hash[:12]}" if metadata.plan_hash else "in the making"
            print(
                f"fcp: following {self.session.plan} ({known}) from step {first_step} of "
                f"{metadata.end_step}, {metadata.num_ranks} ranks, sync {metadata.sync}; {type(trainer).__name__}, "
                f"rows in the plan's order{_RANDOM if metadata.shuffle else ''}; tokens and total_flos count no "
                f"padding{means}",
                file=sys.stderr,
                flush=True,
            )

    def _count_tokens(self, inputs: dict[str, Any], step: Step) -> None:
        """Give the trainer placeholder inputs of this rank's size, from which it counts tokens and FLOPs."""
        tokens = torch.zeros(1, dtype=torch.int64, device=self.session.device).expand(1, step.local_tokens)
        inputs.update(input_ids=tokens, attention_mask=(tokens + 1)[:, :1].expand_as(tokens))


def _planned_loss(
    trainer: Any, kind: str, models: tuple[PreTrainedModel, ...], session: Session, rows: CollatedRows
) -> PlannedLoss:
    is_of_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    means = None if is_of_tokens else BatchMeans(session, rows.learned, rows_per_pass(trainer))
    if kind == "Trainer":
        return CausalLoss(models[0], smoothing=trainer.args.label_smoothing_factor, means=means)
    import trl.trainer.utils

    judged = find_override(trainer, "compute_loss")
    if kind == "DPOTrainer" and judged is not None and not hasattr(trl.trainer.utils, "add_fused_lm_head"):
        return LogitPreferenceLoss(trainer, judged)
    check_trl(trl.trainer.utils, trainer)
    if kind == "SFTTrainer":
        ranks_batch, accumulates = rows_per_pass(trainer), trainer.args.gradient_accumulation_steps > 1
        logged = BatchMeans(session, rows.learned, ranks_batch * session.world.size) if accumulates else None
        return SftLoss(trainer, means, logged)
    return PreferenceLoss(trainer, models, loss_class(trainer).compute_loss)


def _own_loss(
    trainer: Any,
    attentions: Sequence[SwitchedAttention],
    rows: CollatedRows,
    planned: PlannedLoss,
) -> PlannedLoss:
    """Wrap the planned loss with the script's own loss method or function, if it has any."""
    judged = find_override(trainer, "compute_loss") or loss_function_of(trainer)
    if judged is None or isinstance(planned, LogitPreferenceLoss):
        return planned
    return OwnLoss(trainer, judged, planned, attentions=attentions, read=rows)


_FOLLOWER = "_fcp_follower"


class FollowsPlan:
    """Mixin to put before `transformers.Trainer`, or a subclass such as TRL's `SFTTrainer`, in a class's bases.

    Under `fcp launch` it is not needed: there `Trainer` itself is hooked in the same three methods.

    Attributes:
        plan: plan file; defaults to FCP_PLAN.
    """

    plan: Path | str | None = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with following(self, self.plan):
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return a loader with as many batches as the plan's epoch; the steps themselves fetch the rows."""
        return planned_loader(self, super().get_train_dataloader)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run all micro-batches of the plan's next step."""
        return planned_step(self, super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]


@contextmanager
def following(trainer: Any, plan: Path | str | None = None) -> Iterator[None]:
    """Make a trainer follow a plan inside this context; a no-op if it already does.

    Raises:
        FcpError: the plan, the data or the script's settings are not supported.
    """
    if _FOLLOWER in vars(trainer):
        yield
        return
    follower = TrainerFollower(trainer, None if plan is None else Path(plan))
    setattr(trainer, _FOLLOWER, follower)
    try:
        yield
        follower.leave()  # first, since `end` may exit with a signal's status, on which torchrun stops the other ranks
        follower.stop.end()
    finally:
        delattr(trainer, _FOLLOWER)
        follower.close()


def planned_loader(trainer: Any, get_loader: Callable[[], Any]) -> Any:
    """Return a trainer's training loader: the plan's if it follows one, else its own."""
    follower: TrainerFollower | None = vars(trainer).get(_FOLLOWER)
    return get_loader() if follower is None else follower.loader()


def planned_step(trainer: Any, step: Callable[..., Tensor], model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
    """Run a trainer's step: the plan's if it follows one, else its own."""
    follower: TrainerFollower | None = vars(trainer).get(_FOLLOWER)
    return step(model, inputs, num_items_in_batch) if follower is None else follower.run(model, inputs)


class StopAtStepEnd(TrainerCallback):
    """Stops a trainer at the end of the step in which any rank was asked to.

    Args:
        trainer: trainer to which the callback is added.
        session: session of this rank; all ranks agree at the end of every step.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self.has_stopped = False
        self._trainer, self._world, self._source = trainer, session.world, session.source
        self._recorder = session.recorder
        self._request = StopRequest().install()
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._request.agreed(self._world):
            self.has_stopped = control.should_save = control.should_training_stop = True
            if self._source is not None:
                self._source.is_stopped = True
        if control.should_save and self._recorder is not None:
            # The step's record before its checkpoint: a job that is killed behind it resumes after the step.
            self._recorder.end()
            self._recorder.flush()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if self.has_stopped and run_dir and self._world.rank == 0:
            folder = Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"
            note_stopped(Path(run_dir), StoppedScript(checkpoint=str(folder), step=state.global_step))

    def release(self) -> None:
        """Restore the signal handlers."""
        self._trainer.remove_callback(self)
        self._request.release()

    def end(self) -> None:
        """Exit the script if it was stopped, once every rank has written its part of the checkpoint."""
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if self.has_stopped:
            self._world.start_sum(torch.zeros(1, dtype=torch.int64, device="cpu")).wait()
            raise SystemExit(INTERRUPTED)
        if run_dir and self._world.rank == 0:
            forget_stopped(Path(run_dir))


def note_saved(trainer: Any, folder: Any) -> None:
    """Record the folder of a saved model, by default the trainer's own, for the last line of the job."""
    if (run_dir := os.environ.get(RUN_DIR_VARIABLE)) and trainer.is_world_process_zero():
        with RunPaths(run_dir=Path(run_dir)).saved.open("a", encoding="utf-8") as file:
            file.write(f"{Path(folder or trainer.args.output_dir).absolute()}\n")


def checkpoint_to_resume(given: Any) -> Any:
    """Return the checkpoint to resume from: the script's, else that of the stopped run."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    stopped = read_stopped(Path(run_dir)) if not given and run_dir else None
    if stopped is None:
        return given
    if os.environ.get("RANK", "0") == "0":
        print(f"fcp: resuming after step {stopped.step} from {stopped.checkpoint}", file=sys.stderr, flush=True)
    return stopped.checkpoint
