"""Preference pairs (chosen and rejected answers) on a ring, for TRL's unmodified loss code.

TRL calls its models with the same padded batch as without a plan. Hooks replace it with this rank's tokens, and gather
the fused head's results of all ranks back into the shape of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import Override, refusal, require_known
from fcp_cli.integrations.hugging_face.losses import BatchMeans, PlannedLoss, kept_logits
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.runtime.transport import drive

# Per-token outputs of the fused head; only the first has a gradient.
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
_current: ContextVar[PairPack | None] = ContextVar("pairs", default=None)


class PairPack:
    """A micro-batch of pairs: its sequences alternate between chosen and rejected answers.

    Attributes:
        pairs: number of pairs.
    """

    def __init__(self, microbatch: LocalMicroBatch) -> None:
        self.microbatch = microbatch
        self._ring: Ring = microbatch.ring
        lengths = np.asarray(self._ring.layout.lengths, dtype=np.int64)
        self.pairs = len(lengths) // 2
        self._longest = int(lengths.max(initial=1))
        # TRL's batch has all chosen answers first. The last token of a sequence predicts nothing.
        rows = np.arange(len(lengths)) // 2 + self.pairs * (np.arange(len(lengths)) % 2)
        self._lengths = np.empty_like(lengths)
        self._lengths[rows] = lengths
        places = np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else lengths
        predicts = places < np.repeat(lengths, lengths) - 1
        flat = np.repeat(rows, lengths) * (self._longest - 1) + places
        self._read = torch.from_numpy(np.flatnonzero(predicts))
        self._written = torch.from_numpy(flat[predicts])
        self._mask: Tensor | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the pack that the model hooks use."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def inputs(self) -> dict[str, Tensor]:
        """Return the batch [2 * pairs, tokens] for TRL's loss, with placeholder tokens."""
        device = self.microbatch.input_ids.device
        size = (2 * self.pairs, self._longest)
        lengths = torch.from_numpy(self._lengths).to(device)
        attention = (torch.arange(self._longest, device=device) < lengths[:, None]).long()
        # From the loader, not gathered: a gather before a step's first forward, in which DDP broadcasts buffers, could
        # deadlock.
        assert self.microbatch.pack_labels is not None
        completion = torch.zeros(size, dtype=torch.int64, device="cpu")
        completion[:, 1:] = self._placed((self.microbatch.pack_labels != -100).long())
        return {
            "input_ids": torch.zeros(size, dtype=torch.int64, device=device),
            "attention_mask": attention,
            "completion_mask": completion.to(device),
        }

    def whole(self, output: Any) -> Any:
        """Convert a fused head's output from fields [1, own tokens] to fields [2 * pairs, tokens - 1]."""
        if not self.pairs:
            return output
        names = [name for name in _FIELDS if getattr(output, name) is not None]
        own = [getattr(output, name) for name in names]
        found = {
            name: self._placed(values).to(part.dtype)
            for name, part, values in zip(names, own, self._gathered(own), strict=True)
        }
        return replace(output, loss=None, **found)

    def labels(self) -> Tensor:
        """Return labels [2 * pairs, tokens] for `two_way_logits`: 0 for each labeled token, else ignored."""
        labels = self.inputs()["completion_mask"] - 1
        return labels.masked_fill(labels < 0, IGNORED)

    def two_way_logits(self, log_probs: Tensor) -> Tensor:
        """Return logits [2 * pairs, tokens, 2]: one for each token's label and one for all other tokens together.

        Their log-softmax is the log-probability of the label, with its gradient, for any vocabulary size.

        Args:
            log_probs: [1, own tokens], 0 for tokens without a label.
        """
        [whole] = self._gathered([log_probs])
        logits = two_way(self._placed(whole), self.labels()[:, 1:] != IGNORED)
        return torch.cat((logits, torch.zeros_like(logits[:, :1])), dim=1)

    def _placed(self, values: Tensor) -> Tensor:
        """Scatter values [tokens of the pack] into the shape of the batch."""
        read, written = self._read.to(values.device), self._written.to(values.device)
        size = (2 * self.pairs, self._longest - 1)
        return values.new_zeros(size).flatten().index_copy(0, written, values[read]).view(size)

    def _gathered(self, own: list[Tensor]) -> list[Tensor]:
        """Gather tensors [1, own tokens] over the ring to [tokens of the pack]; only own values have a gradient."""
        ring, layout = self._ring, self._ring.layout
        index = torch.from_numpy(layout.index(ring.index)).to(own[0].device)
        held = layout.tokens(ring.index)
        whole = own[0].new_zeros((len(own), layout.total_tokens))
        buffer = own[0].new_zeros((len(own), layout.most_tokens))
        for place, part in enumerate(own):
            buffer[place, :held] = part[0, :held].detach().to(buffer.dtype)
        for member, values in enumerate(drive(ring.channel.gather("rows", buffer))):
            if member != ring.index:
                places = torch.from_numpy(layout.index(member)).to(whole.device)
                whole[:, places] = values[:, : layout.tokens(member)]
        return [whole[place].index_copy(0, index, part[0, :held].to(whole.dtype)) for place, part in enumerate(own)]


def two_way(log_probs: Tensor, is_learned: Tensor) -> Tensor:
    """Return logits [..., 2] whose log-softmax at index 0 is the given log-probability, with its gradient."""
    others = torch.log((-torch.expm1(log_probs.masked_fill(~is_learned, -1.0))).clamp(min=1e-12))
    return torch.stack((log_probs, others), dim=-1).masked_fill(~is_learned[..., None], 0.0)


def hook_pairs(model: nn.Module) -> None:
    """Make a model with TRL's fused head run on the current micro-batch of pairs, if any."""
    model.register_forward_pre_hook(_take_own_tokens, with_kwargs=True, prepend=True)
    model.register_forward_hook(_give_whole_batch)


def _take_own_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    pack = _current.get()
    if pack is None or not kwargs.get("fused_lm_head"):
        return None
    microbatch = pack.microbatch
    replaced = {"attention_mask": None, "labels": None, "shift_labels": microbatch.labels}
    own = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
    return (), {**kwargs, **replaced, **own}


def _give_whole_batch(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    pack = _current.get()
    return output if pack is None or getattr(output, "log_probs", None) is None else pack.whole(output)


# Losses of TRL's trainers under a plan, computed with the fused head that TRL adds to its models.


class SftLoss(PlannedLoss):
    """The loss of `trl.SFTTrainer` (nll or dft), including its logged entropy, accuracy and token count.

    Args:
        trainer: an `SFTTrainer`.
        means: token weights, if the loss is a mean of batch means.
        logged: token weights of entropy and accuracy, which TRL averages over accumulated batches; None: one batch.
    """

    def __init__(self, trainer: Any, means: BatchMeans | None = None, logged: BatchMeans | None = None) -> None:
        super().__init__(means)
        self._trainer, self._logged = trainer, logged
        self._counts: list[Tensor] = []

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        if self._logged is not None:
            self._logged.begin_step(step.index)

    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        outputs = model(
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            shift_labels=microbatch.labels,
            fused_lm_head=True,
        )
        token_losses = -outputs.log_probs  # zero without a label
        if self._trainer.args.loss_type == "dft":
            token_losses = token_losses * outputs.log_probs.exp().detach()
        if self._means is not None:
            token_losses = token_losses * self._means.weights(microbatch)
        weights = 1.0 if self._logged is None else self._logged.weights(microbatch)
        counted = [weights * part for part in (outputs.entropy.detach(), outputs.is_top1, outputs.label_mask)]
        self._counts.append(torch.stack([part.sum(dtype=torch.float64) for part in counted]))
        return microbatch.normalised(token_losses.sum())

    def end_step(self, session: Session, step: Step) -> None:
        tokens = torch.tensor([step.local_tokens], dtype=torch.float64, device=session.device)
        total = torch.cat([torch.stack(self._counts).sum(0), tokens])
        self._counts.clear()
        session.world.all_reduce_sum(total)
        entropy, correct, labelled, read = total.tolist()
        trainer = self._trainer
        trainer._total_train_tokens += int(read)
        metrics = trainer._metrics["train"]
        metrics["entropy"].append(entropy / max(labelled, 1))
        metrics["mean_token_accuracy"].append(correct / max(labelled, 1))
        metrics["num_tokens"] = [trainer._total_train_tokens]


class PreferenceLoss(PlannedLoss):
    """The loss of `trl.DPOTrainer`, of any type: computed by TRL's own code, identically on all ranks of a ring.

    Policy and reference run on this rank's tokens; log-probabilities of other tokens are gathered from the other ranks.
    Each rank computes the gradient of its own tokens.

    Args:
        trainer: a `DPOTrainer`.
        models: unwrapped transformers models, policy and reference.
        compute_loss: TRL's method, which trainer subclasses may override.
    """

    def __init__(self, trainer: Any, models: tuple[Any, ...], compute_loss: Callable[..., Any]) -> None:
        super().__init__()
        self.mean_over = "rows"
        self._trainer = trainer
        self._compute_loss = compute_loss
        self._logged: dict[str, list[float]] = {}
        for model in models:
            hook_pairs(model)

    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        pack = PairPack(microbatch)
        with pack.current():
            if not pack.pairs:  # still run each model, to join the collectives of other ranks
                return microbatch.normalised(self._idle(model, microbatch))
            weights = _weights(pack.inputs()["completion_mask"], degree=microbatch.row.degree)
            with self._collected(weights):
                loss = self._loss(model, pack)
        share = microbatch.normalised(loss * pack.pairs)
        assert microbatch.loss_sum is not None
        microbatch.loss_sum = microbatch.loss_sum / microbatch.row.degree  # every rank of the ring counts it
        return share

    def end_step(self, session: Session, step: Step) -> None:
        total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        tokens = 0
        for logged, read in gather_object([(self._logged, step.local_tokens)]):
            tokens += read
            for name, (value, weight) in logged.items():
                total[name][0] += value
                total[name][1] += weight
        self._logged.clear()
        self._log({name: value / weight if weight else 0.0 for name, (value, weight) in total.items()}, tokens)

    def _log(self, total: Mapping[str, float], tokens: int) -> None:
        trainer = self._trainer
        trainer._total_train_tokens += tokens
        metrics = trainer._metrics["train"]
        for name, value in total.items():
            metrics[name].append(value)
        metrics["num_tokens"] = [trainer._total_train_tokens]

    def _idle(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        idle = {"input_ids": microbatch.input_ids, "labels": microbatch.labels, "fused_lm_head": True}
        if self._trainer.ref_model is not None:
            with torch.no_grad():
                self._trainer.ref_model(**idle)
        log_probs: Tensor = model(**idle).log_probs
        return log_probs.sum() * 0.0

    def _loss(self, model: Any, pack: PairPack) -> Tensor:
        loss: Tensor = self._compute_loss(self._trainer, model, pack.inputs())
        return loss

    @contextmanager
    def _collected(self, weights: Mapping[str, float]) -> Iterator[None]:
        """Collect TRL's metrics of a micro-batch without gathers, since ranks run different numbers of them."""
        trainer = self._trainer
        tokens = trainer._total_train_tokens
        kept, trainer._metrics["train"] = trainer._metrics["train"], defaultdict(list)
        try:
            with self._own_gathers():
                yield
            for name, values in trainer._metrics["train"].items():
                if name != "num_tokens":
                    self._add(name, float(values[-1]), weights.get(name, weights["pairs"]))
        finally:
            trainer._metrics["train"], trainer._total_train_tokens = kept, tokens

    def _add(self, name: str, value: float, weight: float) -> None:
        entry = self._logged.setdefault(name, [0.0, 0.0])
        entry[0] += weight * value
        entry[1] += weight

    @contextmanager
    def _own_gathers(self) -> Iterator[None]:
        """Make accelerate's gather return only this rank's values."""
        accelerator = self._trainer.accelerator
        accelerator.gather = accelerator.gather_for_metrics = _own
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics


def _weights(completion: Tensor, *, degree: int) -> dict[str, float]:
    """Return the weight of each logged metric, in pairs or answer tokens; "pairs" is the default."""
    tokens = completion[:, 1:].sum(1)
    chosen, rejected = (float(part.sum()) / degree for part in tokens.chunk(2))
    return {
        "pairs": len(tokens) / 2 / degree,
        "entropy": chosen + rejected,
        "logits/chosen": chosen,
        "logits/rejected": rejected,
        "mean_token_accuracy": chosen,
    }


def _own(value: Any, *_: Any, **__: Any) -> Any:
    return value


# Preference losses of frameworks on TRL before 1.0, which compute log-probabilities from logits themselves.
#
# `compute_loss` of LLaMA-Factory and ms-swift gets the padded batch of pairs. Hooks run their models on this rank's
# tokens only, and return two-column logits with the same log-probabilities of the labels. In the first step, the loss
# of every micro-batch must equal the mean of the losses of its halves, which are computed by replaying the model's
# outputs.

_USED = frozenset({"input_ids", "attention_mask", "use_cache", "return_dict", "logits_to_keep"})
_EXACT, _ROUGH = 1e-5, 1e-2
"""Maximum difference (relative to at least 1) between a loss and the mean of its halves: fp32, 16-bit types."""


class LogitPreferenceLoss(PreferenceLoss):
    """Loss of a framework's own DPO trainer, with its logged metrics except means over logits."""

    def __init__(self, trainer: Any, judged: Override) -> None:
        super().__init__(trainer, (), type(trainer).compute_loss)
        if hasattr(trainer, "running"):
            raise RunError(
                f"{judged} compares pairs with a running mean over micro-batches (bco), which the plan chooses; use "
                "another loss"
            )
        self._judged, self._is_proved = judged, False
        self._answers: list[Tensor] = []
        self._keep: Any = None
        self._replays = False
        reference = getattr(trainer, "ref_model", None)
        self._models: tuple[nn.Module, ...] = (trainer.model,)
        if reference is not None:
            self._models += (trainer.accelerator.unwrap_model(reference),)
        for model in self._models:
            model.register_forward_pre_hook(self._give_own_tokens, with_kwargs=True, prepend=True)
            model.register_forward_hook(self._give_whole_batch, with_kwargs=True)

    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        self._answers.clear()
        return super().of(model, microbatch)

    def end_step(self, session: Session, step: Step) -> None:
        self._is_proved = True
        super().end_step(session, step)

    def _idle(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        idle = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        for reference in self._models[1:]:
            with torch.no_grad():
                reference(**idle)
        logits: Tensor = model(**idle).logits
        return logits.sum() * 0.0

    def _loss(self, model: Any, pack: PairPack) -> Tensor:
        inputs = pack.inputs()
        del inputs["completion_mask"]
        inputs["labels"] = pack.labels()
        loss: Tensor = self._compute_loss(self._trainer, model, dict(inputs))
        if not self._is_proved and pack.pairs > 1:
            self._require_mean_of_halves(pack, inputs, float(loss.detach()))
        return loss

    def _require_mean_of_halves(self, pack: PairPack, inputs: Mapping[str, Tensor], found: float) -> None:
        middle, dtype, answers = pack.pairs // 2, self._models[0].dtype, tuple(self._answers)
        expected, self._replays = 0.0, True
        for part in (torch.arange(middle, device="cpu"), torch.arange(middle, pack.pairs, device="cpu")):
            rows = torch.cat((part, part + pack.pairs)).to(answers[0].device)
            given = {name: values[rows] for name, values in inputs.items()}
            replayed = iter([values[rows] for values in answers])
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for module in self._models:
                    stack.enter_context(_replaying(module, replayed))
                expected += float(self._compute_loss(self._trainer, self._models[0], given)) * len(part) / pack.pairs
        self._replays = False
        most = _EXACT if dtype == torch.float32 else _ROUGH
        if not abs(found - expected) <= most * max(abs(found), 1.0):
            why = f"is not a mean over pairs: {found:.8g} of a micro-batch, {expected:.8g} of its halves"
            raise refusal(self._judged, f"{why}, and the plan chooses which pairs meet", "use another loss")

    @contextmanager
    def _collected(self, weights: Mapping[str, float]) -> Iterator[None]:
        trainer = self._trainer
        kept = trainer._stored_metrics
        trainer._stored_metrics = defaultdict(lambda: defaultdict(list))
        try:
            with self._own_gathers():
                yield
            for name, values in trainer._stored_metrics["train"].items():
                if not name.startswith("logits/"):  # means over logits, which do not exist under a plan
                    self._add(name, float(values[0]), weights["pairs"])
        finally:
            trainer._stored_metrics = kept

    def _log(self, total: Mapping[str, float], tokens: int) -> None:
        for name, value in total.items():
            self._trainer._stored_metrics["train"][name].append(value)

    # Hooks for the models, which the framework's method calls.

    def _give_own_tokens(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        pack = _current.get()
        if pack is None or not pack.pairs:
            return None
        require_known(self._judged, kwargs, _USED, len(args))
        self._keep = kwargs.get("logits_to_keep")
        return (), {"input_ids": pack.microbatch.input_ids, "position_ids": pack.microbatch.position_ids}

    def _give_whole_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        pack = _current.get()
        if pack is None or not pack.pairs:
            return None
        logits = output.logits
        if not self._replays:
            logits = pack.two_way_logits(pack.microbatch.log_probs(logits))
            self._answers.append(logits.detach())
        return CausalLMOutputWithPast(logits=kept_logits(logits, self._keep))


@contextmanager
def _replaying(module: nn.Module, answers: Iterator[Tensor]) -> Iterator[None]:
    """Make a model return logits computed earlier by it or by another model."""

    def forward(*_: Any, position_ids: Any = None, **__: Any) -> Any:  # hooks inspect this parameter
        return CausalLMOutputWithPast(logits=next(answers))

    own = vars(module).get("forward")  # accelerate's wrapper with autocast
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
