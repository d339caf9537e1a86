"""Runs a script's own `compute_loss` under a plan, on a batch of this rank's tokens of a micro-batch.

If it calls the Trainer's own method, that method computes the planned loss, which must be returned unchanged. If it
calls the model itself, the model returns this rank's logits, and the loss must be a sum of per-token losses. The first
step verifies this: the loss is recomputed on both halves of every part and, for a micro-batch on several ranks that
fits on one, by a single process.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import OWN_LOOP, Override, loss_class, refusal, require_known
from fcp_cli.integrations.hugging_face.losses import PlannedLoss, kept_logits
from fcp_cli.integrations.transformers.linear import linear_layers
from fcp_cli.integrations.transformers.preparation import SwitchedAttention
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch, Step

_EXACT, _ROUGH = 1e-6, 1e-2
"""Maximum relative difference between two values of a loss, in fp32 and in 16-bit types."""
_USED = {"input_ids", "attention_mask", "labels", "num_items_in_batch", "logits_to_keep", "use_cache", "return_dict"}
"""Model arguments supported under a plan, including those without effect in training."""
_MOST_ALONE = 4096
"""Maximum tokens of a micro-batch recomputed by a single process for comparison, with all logits at once."""
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast")


@dataclass(slots=True, eq=False)
class _Batch:
    """Inputs and results of one call of the script's loss method.

    Attributes:
        tokens: [1, n] tokens of this rank, on which the model runs.
        shown: batch passed to the method, with one extra token so that each token's label is at the next position.
        is_whole: whether the method runs on complete sequences without the plan, for comparison.
        delegated: planned loss, if the Trainer's own method was called.
        logits: [1, n, vocabulary] logits of the model, if the method called it.
        forwards: number of model calls by the method.
        is_planned: whether the planned loss is running and calls the model itself.
    """

    tokens: Tensor
    positions: Tensor
    shown: dict[str, Tensor]
    is_whole: bool = False
    delegated: Tensor | None = None
    logits: Tensor | None = None
    forwards: int = 0
    is_planned: bool = False
    keep: Any = None
    labels: Tensor | None = None
    items: Any = None
    planned: Callable[[], Tensor] | None = None

    @property
    def is_labelled(self) -> bool:
        return bool((self.shown["labels"] != IGNORED).any())


class OwnLoss(PlannedLoss):
    """Loss of a trainer whose script computes it in its own method or function.

    Args:
        trainer: the script's trainer.
        judged: the method or function, for messages.
        planned: planned implementation of the trainer's own loss. A script's loss that does not call it is supported,
            after verification, if it is a mean over tokens.
        attentions: attention switches of the models, to run them without the plan.
        read: function from a row number to its tokens and labels.
    """

    def __init__(
        self,
        trainer: Any,
        judged: Override | str,
        planned: PlannedLoss,
        *,
        attentions: Sequence[SwitchedAttention],
        read: Callable[[int], Any],
    ) -> None:
        super().__init__()
        self._trainer, self._judged, self._planned = trainer, judged, planned
        self._attentions, self._read = attentions, read
        self.mean_over = planned.mean_over
        self._batch: _Batch | None = None
        self._is_proved = False
        # For each micro-batch on several ranks: its loss on the ring, and by a single process if that was computed.
        self._compared: dict[int, tuple[float, float | None]] = {}
        self._kind = loss_class(trainer)
        self._replaced = self._kind.compute_loss
        self._kind.compute_loss = self._dispatcher(self._replaced)
        self._hooks = (
            self._model.register_forward_pre_hook(self._give_own_tokens, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._give_whole_batch),
        )

    @property
    def _model(self) -> Any:
        """The script's unwrapped model. PEFT adapters call the inner model's `forward`, bypassing its hooks."""
        return self._trainer.model

    def close(self) -> None:
        """Remove the hooks."""
        self._kind.compute_loss = self._replaced
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, step: Step) -> None:
        self._planned.begin_step(step)

    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        batch = _shown(microbatch.input_ids, microbatch.position_ids, microbatch.labels)
        batch.planned = lambda: self._planned.of(model, microbatch)
        result = self._run(model, batch, microbatch.denominator)
        if batch.delegated is not None:
            self._require_unchanged(batch, result)
            return batch.delegated
        self._require_one_call(batch)
        if not batch.is_labelled and batch.logits is not None:
            result = batch.logits.sum() * 0.0  # the mean over no tokens is NaN
        if not self._is_proved:
            self._require_halves(model, microbatch, batch, result)
            self._note(microbatch, result)
        # The trainer's gradients are averaged over ranks.
        return microbatch.normalised(result * microbatch.denominator / self._trainer.accelerator.num_processes)

    def end_step(self, session: Session, step: Step) -> None:
        self._planned.end_step(session, step)
        if not self._is_proved:
            self._require_equal_rings(step)
            self._is_proved = True

    def _run(self, model: Any, batch: _Batch, items: Any) -> Tensor:
        trainer = self._trainer
        self._batch = batch
        try:
            with _no_collectives(self._judged, batch):
                batch.shown = trainer._prepare_inputs(batch.shown)
                result = trainer.compute_loss(model, dict(batch.shown), num_items_in_batch=items)
        finally:
            self._batch = None
        result = result[0] if isinstance(result, tuple) else result
        if not isinstance(result, Tensor) or result.dim():
            raise RunError(f"{self._judged} returns a {type(result).__name__} and no loss (a tensor of one number)")
        return result

    def _dispatcher(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for the Trainer's `compute_loss` that computes the planned loss."""
        owner = self

        @wraps(own)
        def compute_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = owner._batch if trainer is owner._trainer else None
            if batch is None or batch.planned is None or not owner._is_delegated(batch, inputs, args, kwargs):
                return own(trainer, model, inputs, *args, **kwargs)
            if batch.delegated is not None:
                raise RunError(f"{owner._judged} calls the Trainer's own compute_loss twice; {OWN_LOOP}")
            batch.is_planned = True
            batch.delegated = batch.planned()
            batch.is_planned = False
            return batch.delegated

        return compute_loss

    def _is_delegated(self, batch: _Batch, inputs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        wants_outputs = args[0] if args else kwargs.get("return_outputs", False)
        has_function = self._trainer.compute_loss_func is not None
        return (
            not wants_outputs
            and not has_function
            and inputs.keys() == batch.shown.keys()
            and all(inputs[name] is value for name, value in batch.shown.items())
        )

    def _require_unchanged(self, batch: _Batch, result: Tensor) -> None:
        if batch.forwards:
            raise RunError(f"{self._judged} calls the model itself and the Trainer's own compute_loss; {OWN_LOOP}")
        if result is not batch.delegated:
            own, changed = (float(value.detach()) for value in (batch.delegated, result) if value is not None)
            why = f"changes the loss of the Trainer's own compute_loss ({own:.7g} became {changed:.7g})"
            raise refusal(self._judged, why, "remove the change")

    def _require_one_call(self, batch: _Batch) -> None:
        if self.mean_over != "tokens":
            why = "does not return the loss of the Trainer's own compute_loss, which a mean over pairs or batches needs"
            raise refusal(self._judged, why)
        if batch.forwards != 1:
            raise refusal(self._judged, f"calls the model {batch.forwards} times for a micro-batch, and not once")

    # Hooks for the model, which the script's method calls.

    def _give_own_tokens(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        batch = self._batch
        if batch is None or batch.is_planned:
            return None
        batch.forwards += 1
        if batch.forwards > 1:
            self._require_one_call(batch)
        if batch.is_whole:
            return None
        given = {**kwargs, "input_ids": args[0]} if args else kwargs
        require_known(self._judged, given, _USED, len(args) - 1)
        self._require_own(batch, given)
        batch.keep, batch.labels, batch.items = (
            given.get(name) for name in ("logits_to_keep", "labels", "num_items_in_batch")
        )
        return (), {"input_ids": batch.tokens, "position_ids": batch.positions}

    def _require_own(self, batch: _Batch, given: Mapping[str, Any]) -> None:
        for name in ("input_ids", "attention_mask", "labels"):
            is_cut = name == "labels" and given.get("logits_to_keep") is not None
            if given.get(name) is not None and given[name] is not batch.shown.get(name) and not is_cut:
                raise refusal(self._judged, f"calls the model with other {name} than the batch's")

    def _give_whole_batch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        batch = self._batch
        if batch is None or batch.is_planned or batch.is_whole:
            return None
        batch.logits = output.logits
        return _answer(module, batch, output.logits)

    # Verification in the first step.

    def _require_halves(self, model: Any, microbatch: LocalMicroBatch, batch: _Batch, result: Tensor) -> None:
        """Raise RunError unless the loss of this rank's tokens is the sum of the losses of both halves."""
        labelled = (microbatch.labels[0] != IGNORED).nonzero().flatten()
        if len(labelled) < 2:
            return
        assert batch.logits is not None
        middle = int(labelled[len(labelled) // 2])
        halves = []
        for part in (slice(0, middle), slice(middle, None)):
            found = _shown(batch.tokens[:, part], batch.positions[..., part], microbatch.labels[:, part])
            replay = _Replay(model, self._model, found, batch.logits[:, part].detach())
            with torch.no_grad():
                halves.append(float(self._run(replay, found, microbatch.denominator)))
        self._require_close(float(result.detach()), sum(halves), batch.logits.dtype, "two halves of its tokens")

    def _require_close(self, found: float, expected: float, dtype: torch.dtype, of: str) -> None:
        most = _EXACT if dtype in (torch.float32, torch.float64) else _ROUGH
        if not abs(found - expected) <= most * max(abs(found), abs(expected)):
            raise RunError(
                f"{self._judged} is not a sum over tokens: {found:.8g} of a micro-batch, {expected:.8g} of {of} "
                f"(relative difference {abs(found - expected) / max(abs(found), abs(expected), 1e-30):.1e}, at most "
                f"{most:.0e}); a rank has a part of each sequence only: divide a sum of token losses by "
                f"num_items_in_batch, or {OWN_LOOP}"
            )

    def _note(self, microbatch: LocalMicroBatch, result: Tensor) -> None:
        """Record the loss of a micro-batch on several ranks and, if comparable, that of a single process."""
        row = microbatch.row
        if row.degree == 1 or not self._runs_alone():
            return
        found = float(result.detach())
        self._compared[row.order] = found, None
        if microbatch.ring.index or sum(row.lengths) > _MOST_ALONE:
            return
        batch = self._whole(row.sequences, row.lengths)
        with torch.no_grad(), ExitStack() as stack:
            for attention in self._attentions:
                stack.enter_context(attention.off_rings())
            self._compared[row.order] = found, float(self._run(self._model, batch, microbatch.denominator))

    def _runs_alone(self) -> bool:
        """Return whether a single process can run the model: unsharded, with its own attention, deterministic."""
        model = self._model
        drops = any(isinstance(module, nn.Dropout) and module.p and module.training for module in model.modules())
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        return not (drops or is_sharded or linear_layers(model))

    def _whole(self, rows: Sequence[int], lengths: Sequence[int]) -> _Batch:
        """Return complete sequences as a padded batch, like the script's collator."""
        device, longest = self._trainer.args.device, max(lengths)
        size = (len(rows), longest)
        tokens = torch.zeros(size, dtype=torch.int64, device="cpu")
        labels, mask = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids, learned = self._read(row)
            tokens[place, :length], labels[place, :length], mask[place, :length] = ids[:length], learned[:length], 1
        shown = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
        shown = {name: value.to(device) for name, value in shown.items()}
        return _Batch(tokens=shown["input_ids"], positions=shown["input_ids"], shown=shown, is_whole=True)

    def _require_equal_rings(self, step: Step) -> None:
        by_ring: defaultdict[int, float] = defaultdict(float)
        alone: dict[int, float] = {}
        for own in gather_object([self._compared]):
            for order, (share, whole) in own.items():
                by_ring[order] += share
                if whole is not None:
                    alone[order] = whole
        parameter = next(self._model.parameters())
        dtype = parameter.dtype if self._trainer.accelerator.mixed_precision == "no" else torch.bfloat16
        for order, whole in sorted(alone.items()):
            where = f"one process (step {step.index}, micro-batch {order})"
            self._require_close(by_ring[order], whole, dtype, where)


class _Replay:
    """Substitute for a model that returns logits computed earlier, and delegates all else to the model."""

    def __init__(self, model: Any, base: nn.Module, batch: _Batch, logits: Tensor) -> None:
        self._replayed = (model, base, batch, logits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, base, batch, logits = self._replayed
        batch.keep, batch.labels, batch.items = (
            kwargs.get(name) for name in ("logits_to_keep", "labels", "num_items_in_batch")
        )
        return _answer(base, batch, logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replayed[0], name)


def _shown(tokens: Tensor, positions: Tensor, labels: Tensor) -> _Batch:
    """Return a batch with labels shifted by one, as transformers' models expect."""
    ignored = labels.new_full((1, 1), IGNORED)
    shown = {
        "input_ids": torch.cat((tokens, tokens.new_zeros((1, 1))), dim=1),
        "labels": torch.cat((ignored, labels), dim=1),
    }
    shown["attention_mask"] = torch.ones_like(shown["input_ids"])
    return _Batch(tokens=tokens, positions=positions, shown=shown)


def _answer(model: Any, batch: _Batch, logits: Tensor) -> Any:
    """Return the model output for the batch passed to the method, with the loss if requested."""
    logits = kept_logits(torch.cat((logits, torch.zeros_like(logits[:, :1])), dim=1), batch.keep)
    loss = None
    if batch.labels is not None and bool((batch.labels != IGNORED).any()):
        items = {} if batch.items is None else {"num_items_in_batch": batch.items}
        loss = model.loss_function(logits=logits, labels=batch.labels, vocab_size=logits.shape[-1], **items)
    elif batch.labels is not None:
        loss = logits.sum() * 0.0
    return CausalLMOutputWithPast(loss=loss, logits=logits)


@contextmanager
def _no_collectives(judged: Override | str, batch: _Batch) -> Iterator[None]:
    """Raise RunError for collectives in the script's method, since ranks call it different numbers of times.

    Other threads of this process, e.g. the one that coordinates planned steps, may run their own collectives.
    """
    own = {name: getattr(dist, name) for name in _COLLECTIVES}
    caller = threading.get_ident()

    def refusing(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if batch.is_planned or threading.get_ident() != caller:
                return own[name](*args, **kwargs)
            raise RunError(
                f"{judged} calls torch.distributed.{name}, which ranks with fewer micro-batches would not call; "
                "remove it"
            )

        return collective

    for name in own:
        setattr(dist, name, refusing(name))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
