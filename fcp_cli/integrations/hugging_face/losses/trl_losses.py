"""Losses of TRL's trainers under a plan, computed with the fused head that TRL adds to its models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from fcp_cli.integrations.hugging_face.losses.batch_means import BatchMeans
from fcp_cli.integrations.hugging_face.losses.labels import PlannedLoss
from fcp_cli.integrations.hugging_face.losses.pairs import PairPack, hook_pairs
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step


class SftLoss(PlannedLoss):
    """The loss of `trl.SFTTrainer` (nll or dft), including its logged entropy, accuracy and token count.

    Args:
        trainer: an `SFTTrainer`.
        means: token weights, if the loss is a mean of batch means.
    """

    def __init__(self, trainer: Any, means: BatchMeans | None = None) -> None:
        super().__init__(means)
        self._trainer = trainer
        self._counts: list[Tensor] = []

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
        counted = (outputs.entropy.detach(), outputs.is_top1, outputs.label_mask)
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
