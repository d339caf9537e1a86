"""The bundled trainer: opens a run, follows its plan, writes metrics and checkpoints.

With `--zero 0` and 1, ranks hold full replicas, whose gradients are reduced once per step after the rank's last
micro-batch. DistributedDataParallel is not used: it rearranges buckets after the first step, so a resumed run would not
be bitwise equal. From `--zero 2`, the model is sharded with FSDP2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.cost.recipe import check_shard_ranks
from fcp_cli.errors import RunError
from fcp_cli.models.model import load_model
from fcp_cli.models.weights import WeightFiles, find_weights
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.checkpoints import CheckpointHeader, check_header, check_unfinished, checkpoints, read_header
from fcp_cli.runs.owner import own_unless_launched
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runs.trained_run import require_recorded
from fcp_cli.runtime import Fetch, LocalMicroBatch, Session, Step, start
from fcp_cli.runtime.gradients import WEIGHT_DTYPES, GradientSync
from fcp_cli.runtime.metrics import device_name
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.runtime.transport import World
from fcp_cli.training.checkpoint import (
    CheckpointSaver,
    TrainState,
    keep_origin,
    kept_names,
    load_checkpoint,
    remove_leftovers,
)
from fcp_cli.training.data import open_data
from fcp_cli.training.evaluation import evaluate, open_held_out
from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from fcp_cli.training.pictures import open_visuals
from fcp_cli.training.progress import TrainingReport, peak_of, run_facts, utilisation
from fcp_cli.training.settings import TrainSettings, require_libraries
from fcp_cli.training.sharding import Replica, describe_offload, open_offload, open_shares
from fcp_cli.training.weights import (
    adapted_names,
    build_model,
    choose_trained,
    describe_frozen,
    describe_unexpected,
    draw_weights,
    export_adapters,
    export_model,
    has_vision,
    load_weights,
    match_weights,
    model_config,
    saved_buffers,
    shard_model,
    unexpected_weights,
)
from fcp_cli.util.console import note
from fcp_cli.util.words import counted, short_count


def train(settings: TrainSettings, stop: StopRequest) -> bool:
    """Train on this rank until the last step. Collective.

    Returns:
        Whether the run finished; False if it was stopped, after saving a checkpoint.
    """
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":
            owned = own_unless_launched(settings.run_dir)
            stack.enter_context(owned or nullcontext())
        _require_free(settings)
        fetch, shows_pictures = _open_rows(settings, stack)
        if has_vision(model_config(settings.model)) and not shows_pictures:
            settings = replace(settings, freeze_vision=True)  # else weight decay would shrink untrained weights
        session = stack.enter_context(
            start(
                settings.plan,
                fetch,
                device=_device(settings.device),
                grad_ring_dtype=settings.grad_ring_dtype,
                skip_bad_rows=settings.bad_rows == "skip",
                metrics=RunPaths(run_dir=settings.run_dir).metrics,
            )
        )
        held_out = None
        if settings.eval_manifest is not None:
            held_out = open_held_out(settings, session, lambda theirs: _open_rows(theirs, stack)[0])
        trainer = stack.enter_context(closing(Trainer(settings, session, held_out)))
        if session.recorder is not None:
            _require_shared(trainer.paths, session)
        return trainer.run(stop)


def _open_rows(settings: TrainSettings, stack: ExitStack) -> tuple[Fetch, bool]:
    """Return the manifest's rows, open until the stack exits, and whether they have images or videos."""
    visuals = open_visuals(settings, model_config(settings.model))
    if visuals is not None:
        stack.callback(visuals.close)
        return visuals, True
    tokens = open_data(
        settings.plan,
        settings.manifest,
        vocab_size=load_model(settings.model).vocab_size,
        seed=settings.seed,
        length_column=settings.length_column,
        kept=RunPaths(run_dir=settings.run_dir).origin if settings.resume else None,
    )
    return tokens, False


def _require_free(settings: TrainSettings) -> None:
    """Raise RunError if the run directory already has a run; called before any rank writes."""
    paths = RunPaths(run_dir=settings.run_dir)
    if not settings.resume and (paths.metrics.exists() or checkpoints(paths.checkpoints)):
        raise RunError(
            f"{settings.run_dir} already holds a run; continue it with --resume, or choose another --run-dir"
        )


def _require_shared(paths: RunPaths, session: Session) -> None:
    """Check that all ranks see rank 0's files: else checkpoints would be scattered over nodes."""
    dist.barrier()
    missing = torch.zeros(1, device=session.device)
    missing += not paths.metrics.exists()
    session.world.all_reduce_sum(missing)
    if missing.item():
        raise RunError(
            f"{int(missing.item())} ranks do not see the run directory {paths.run_dir} of rank 0; choose a --run-dir "
            "on a file system that all nodes share"
        )


def _device(kind: str) -> torch.device | None:
    if kind == "auto":
        return None
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


class Trainer:
    """A rank's model and optimizer and, on rank 0, the run's output."""

    def __init__(self, settings: TrainSettings, session: Session, held_out: Session | None = None) -> None:
        self.settings = settings
        self.session = session
        self.held_out = held_out
        self.paths = RunPaths(run_dir=settings.run_dir)
        self.last_step = min(settings.steps or session.metadata.end_step, session.metadata.end_step)
        metadata = session.metadata
        self.recipe = settings.recipe(metadata.recipe, sync=metadata.sync, device=session.device.type)
        check_shard_ranks(self.recipe, metadata.num_ranks)
        require_libraries(self.recipe, settings)
        self.spec, self.peak = load_model(settings.model), peak_of(device_name(session.device), self.recipe)
        self.is_sharded = self.recipe.zero_stage > 1
        self.resumed_from = self._newest_checkpoint() if settings.resume else None
        # Adapter checkpoints contain only adapters.
        self.starts_whole = self.resumed_from is None or self.recipe.lora is not None
        weights = find_weights(settings.weights) if settings.weights is not None and self.starts_whole else None
        self._build(weights)
        self._distribute(weights)
        self.offload = open_offload(self.recipe, settings.model, metadata, session.device)
        self.optimizer = make_optimizer(self.trained, settings)
        self.saver = CheckpointSaver(
            self.paths.checkpoints,
            session,
            keep=settings.keep,
            in_background=settings.async_save,
            saved=self._note_saved,
        )
        self.first_step = self._resume()
        if session.rank == 0 and weights is not None and self.checkpoint_names is not None:
            keep_origin(self.paths.origin, model=settings.model, source=weights.folder, names=self.checkpoint_names)
        self._report = self._open_metrics()
        self._announce(weights)

    def _build(self, weights: WeightFiles | None) -> None:
        """Build the model with adapters and frozen weights, and match its tensors with the initial checkpoint's."""
        settings, recipe = self.settings, self.recipe
        built: nn.Module = build_model(
            settings.model,
            seed=settings.seed,
            # fully_shard moves layer by layer, so that no device holds the full model
            device=torch.device("cpu") if self.is_sharded else self.session.device,
            recompute=recipe.recompute,
            levels=self.session.recompute_levels,
            freeze_vision=recipe.freeze_vision,
            is_filled=False,
        )
        self.model = built.double() if recipe.precision == "fp64" else built
        self.parameters = sum(parameter.numel() for parameter in built.parameters())  # without adapters
        if weights is not None:
            names: dict[str, str] | None = match_weights(self.model, weights)
        else:
            names = kept_names(self.paths.origin) if self.resumed_from is not None else None
        choose_trained(self.model, recipe, seed=settings.seed)
        self.checkpoint_names = names
        self.names = None if names is None else adapted_names(names, self.model)

    def _distribute(self, weights: WeightFiles | None) -> None:
        """Fill the model, and shard it or its optimizer state as the recipe says. Collective."""
        session, recipe = self.session, self.recipe
        self.shares = open_shares(
            recipe, rank=session.rank, ranks=session.metadata.num_ranks, device_type=session.device.type
        )
        dtype = WEIGHT_DTYPES[recipe.precision] if recipe.precision == "bf16" else None
        if self.shares.mesh is None or not self.is_sharded:
            self._fill(weights)  # first, since a replica broadcasts and converts the weights
            self.replica: Replica | None = Replica(self.model, session.world, self.shares, dtype)
            self.weights, self.trained = self.replica.weights, self.replica.trained
        else:
            shard_model(self.model, self.shares.mesh, dtype=dtype, keeps_weights=recipe.zero_stage == 2)
            self._fill(weights)  # afterwards, since each rank fills its shard only
            self.replica = None
            self.weights = dict(self.model.named_parameters())
            self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _fill(self, weights: WeightFiles | None) -> None:
        """Fill the model with a checkpoint's weights or random ones."""
        if weights is not None and self.names is not None:
            load_weights(self.model, weights, self.names)
        elif self.starts_whole:
            draw_weights(self.model, self.settings.seed)

    @property
    def followed(self) -> nn.Module | GradientSync:
        """Module or gradient sync that `Session.steps` reduces."""
        return self.model if self.replica is None else self.replica

    def run(self, stop: StopRequest) -> bool:
        """Train until the last step or a stop request; save a checkpoint in either case."""
        for step in self._steps():
            stopping = self._train_step(step, stop)
            finished = step.index + 1
            evaluations = self.settings.eval_every
            if finished == self.last_step or (evaluations > 0 and finished % evaluations == 0):
                self._evaluate(step.index)
            every = self.settings.checkpoint_every
            if stopping or finished == self.last_step or (every > 0 and finished % every == 0):
                self._save(finished)
            exports = self.settings.export_every
            if finished == self.last_step or (exports > 0 and finished % exports == 0):
                self.saver.finish()  # an export that fails must not lose the checkpoint
                self._export()
            if stopping and finished < self.last_step:
                self.saver.finish()
                return False
        self.saver.finish()
        return True

    def _steps(self) -> Iterator[Step]:
        """Yield this rank's steps."""
        steps = self.session.steps(
            self.followed,
            first_step=self.first_step,
            reduce=self.recipe.reduce,
            on_nan=self.settings.on_nan,
        )
        with closing(steps):  # the plan may have more steps than this run
            yield from islice(steps, self.last_step - self.first_step)

    def _train_step(self, step: Step, stop: StopRequest) -> bool:
        """Run forward, backward and update; return whether any rank was asked to stop."""
        for microbatch in step:
            self._loss(microbatch).backward()  # type: ignore[no-untyped-call]
        for problem in step.problems.values():
            note(f"step {step.index}: skipped {problem}")
        learning_rate, grad_norm = self._update(step)
        loss = step.reduced_loss()
        self._require_finite(step, loss, float(grad_norm))
        step.note(loss=loss, grad_norm=float(grad_norm), learning_rate=learning_rate)
        stopping, writing = reduce_flags(self.session.world, stop=bool(stop), writing=self.saver.is_writing)
        if not writing:
            self.saver.publish()
        if self.session.recorder is not None:  # before saving the step, so that a resumed run has its record
            self.session.recorder.end()
            self.session.recorder.flush()
        return stopping

    def _loss(self, microbatch: LocalMicroBatch) -> Tensor:
        """Run a micro-batch forward; return this rank's share of the step's loss."""
        inputs = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        offloading = nullcontext() if self.offload is None else self.offload.of(microbatch)
        with self._precision(), offloading:
            if self.recipe.loss == "chunked":
                return microbatch.normalised(self.model(**inputs, labels=microbatch.labels).loss)
            logits = self.model(**inputs).logits
        return microbatch.loss(logits)

    def _update(self, step: Step) -> tuple[float, Tensor]:
        """Clip gradients, update weights and free gradients; return learning rate and gradient norm []."""
        learning_rate = learning_rate_at(step.index, settings=self.settings, plan_steps=self.session.metadata.end_step)
        set_learning_rate(self.optimizer, learning_rate)
        if step.is_skipped:
            self._note_skipped(step, "loss")
            return learning_rate, torch.tensor(math.nan)
        norm = clip_gradients(
            self.trained,
            self.settings.max_grad_norm,
            group=None if self.is_sharded else self.shares.shard_group,  # FSDP2's gradients are DTensors
        )
        # Only skip-step synchronizes host and device before the update; to stop, the norm is checked afterwards.
        is_skipped = self.settings.on_nan == "skip-step" and not norm.isfinite().item()
        if is_skipped:
            self._note_skipped(step, "gradient norm")
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.replica is not None and not is_skipped:
            self.replica.gather()
        return learning_rate, norm

    def _note_skipped(self, step: Step, quantity: str) -> None:
        if self.session.rank == 0:
            note(f"step {step.index}: skipped, since its {quantity} is not finite")

    def _require_finite(self, step: Step, loss: float, grad_norm: float) -> None:
        """Raise RunError on all ranks if the update used non-finite numbers."""
        if self.settings.on_nan != "stop":
            return
        if not math.isfinite(loss):
            raise RunError(f"step {step.index}: the loss is {loss}; the message of the affected rank names the rows")
        if not math.isfinite(grad_norm):
            raise RunError(
                f"step {step.index}: the norm of the gradients is {grad_norm}, although the loss is {loss:.4g}; lower "
                "--learning-rate, or skip such steps with --on-nan skip-step"
            )

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the forward context: autocast, or none."""
        if self.recipe.precision != "amp":
            return nullcontext()
        return torch.autocast(self.session.device.type, dtype=torch.bfloat16)

    def _evaluate(self, step: int) -> None:
        """Record the losses of held-out rows, if there are any. Collective."""
        if self.held_out is None:
            return
        record = evaluate(self.held_out, self.model, self.followed, self.recipe, step=step, precision=self._precision)
        if self.session.recorder is not None:
            self.session.recorder.write(record)

    def _save(self, finished: int) -> None:
        if self.session.recorder is not None:
            self.session.recorder.sync()
        self.saver.save(self._header(finished), self._state)

    def _note_saved(self, path: Path, step: int) -> None:
        if step < self.last_step and not self.settings.quiet:
            note(f"saved {path}")

    def _export(self) -> None:
        """Export the model as a Hugging Face checkpoint, or its adapters in peft's format. Collective."""
        where: dict[str, Any] = {
            "rank": self.session.rank,
            "barrier": dist.barrier,
            "dtype": WEIGHT_DTYPES[self.recipe.precision],
            "source": self.paths.origin if self.names is not None else None,
        }
        if self.recipe.lora is not None:
            export_adapters(self.model, self.paths.model, base=self.settings.weights, **where)
        else:
            num_ranks = self.session.metadata.num_ranks
            export_model(self.model, self.paths.model, num_ranks=num_ranks, names=self.names, **where)
        if self.session.rank == 0 and not self.settings.quiet:
            note(f"exported {self.paths.model}")

    def _newest_checkpoint(self) -> Path | None:
        if self.session.rank == 0:
            remove_leftovers(self.paths.checkpoints)
        found = checkpoints(self.paths.checkpoints)
        if found and self.session.rank == 0:
            require_recorded(found[-1], accepts=self.settings.accept_unrecorded)
        return found[-1] if found else None

    def _resume(self) -> int:
        """Load the newest checkpoint, if any; return the first step to run."""
        found = self.resumed_from
        if found is None:
            return 0
        header, wanted = read_header(found), self._header(0)
        if wanted.model == str(self.paths.origin):  # a copy, since the initial checkpoint is gone
            wanted = replace(wanted, model=header.model)
        plan, run_dir = self.session.metadata, self.settings.run_dir
        check_header(header, wanted, plan, checkpoint=found)
        check_unfinished(found, run_dir, header.step, last_step=self.last_step, end_step=plan.end_step)
        load_checkpoint(found, self._state, header=header, rank=self.session.rank, num_ranks=plan.num_ranks)
        if self.replica is not None:
            self.replica.gather(frozen=True)
        return header.step

    @property
    def _state(self) -> TrainState:
        # Frozen weights are reread from the origin, so only adapters are saved, which are much smaller.
        from_elsewhere = self.settings.weights is not None
        kept = {name: weight for name, weight in self.weights.items() if weight.requires_grad or not from_elsewhere}
        return TrainState(
            weights=kept,
            buffers=saved_buffers(self.model),
            optimizer=self.optimizer,
            device=self.session.device,
            shares=self.shares,
        )

    def _header(self, step: int) -> CheckpointHeader:
        metadata = self.session.metadata
        return CheckpointHeader(
            step=step,
            plan_hash=metadata.plan_hash,
            num_ranks=metadata.num_ranks,
            sharding="replicated" if self.recipe.zero_stage == 0 else "sharded",
            shards=self.shares.count,
            model=self.settings.model,
            torch=torch.__version__,
        )

    def _open_metrics(self) -> TrainingReport | None:
        """Open the run's metrics; return rank 0's reporter."""
        recorder, report = self.session.recorder, None
        if recorder is None:
            return None
        if self.session.rank == 0:
            report = TrainingReport(self.settings, first_step=self.first_step)
            recorder.listeners.append(report.feed)
            recorder.utilisation = self._utilisation
        recorder.open(
            self.first_step,
            **run_facts(self.settings, steps=self.last_step, parameters=self.parameters, peak=self.peak),
        )
        return report

    def _utilisation(self, plan: StepPlan, seconds: float) -> float | None:
        ranks = self.session.metadata.num_ranks
        return utilisation(self.spec, self.recipe, plan, seconds=seconds, peak=self.peak, ranks=ranks)

    def _announce(self, weights: WeightFiles | None) -> None:
        if self.session.rank != 0:
            return
        metadata = self.session.metadata
        note(
            f"{self.settings.model}: {short_count(self.parameters)} parameters, {self.recipe.describe()}, on "
            f"{counted(metadata.num_ranks, 'rank')} ({self.session.device.type}), "
            f"steps {self.first_step + 1} to {self.last_step} of {metadata.end_step}"
        )
        if self.offload is not None:
            note(describe_offload(self.offload.above_tokens, self.recipe, self.settings.model, metadata))
        if self.settings.weights is None and not self.first_step:
            note(f"{self.settings.model} starts from random weights; --weights FOLDER starts from a checkpoint")
        if weights is not None and self.names is not None:
            left_out = describe_unexpected(unexpected_weights(self.names, weights, self.model), weights)
            if left_out:
                note(f"{self.settings.model} {left_out}")
        frozen = describe_frozen(self.model, self.recipe, self.settings.model)
        if frozen is not None:
            note(frozen)

    def close(self) -> None:
        if self._report is not None:
            self._report.close()


def reduce_flags(world: World, *, stop: bool, writing: bool) -> tuple[bool, bool]:
    """Return whether any rank was asked to stop, and whether any is writing a checkpoint; equal on all ranks.

    Exchanged between hosts, so that no accelerator waits.
    """
    told = torch.tensor([stop, writing], dtype=torch.int64, device="cpu")
    world.start_sum(told).wait()
    any_stops, any_writes = told.tolist()
    return bool(any_stops), bool(any_writes)
