"""Preference losses of frameworks on TRL before 1.0, which compute log-probabilities from logits themselves.

`compute_loss` of LLaMA-Factory and ms-swift gets the padded batch of pairs. Hooks run their models on this rank's
tokens only, and return two-column logits with the same log-probabilities of the labels. In the first step, the loss of
every micro-batch must equal the mean of the losses of its halves, which are computed by replaying the model's outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.losses.labels import kept_logits
from fcp_cli.integrations.hugging_face.losses.pairs import PairPack, current_pairs
from fcp_cli.integrations.hugging_face.losses.trl_losses import PreferenceLoss
from fcp_cli.integrations.hugging_face.overrides import OWN_LOOP, Override
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step

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
        for part in (torch.arange(middle), torch.arange(middle, pack.pairs)):
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
            raise RunError(
                f"{self._judged} is not a mean over pairs: {found:.8g} of a micro-batch, {expected:.8g} of its halves; "
                f"the plan chooses which pairs meet in a micro-batch: use another loss, or {OWN_LOOP}"
            )

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
        pack = current_pairs()
        if pack is None or not pack.pairs:
            return None
        others = sorted(name for name, value in kwargs.items() if name not in _USED and value not in (None, False))
        if others or args:
            raise RunError(
                f"{self._judged} gives the model {', '.join(others) or 'arguments without names'}, which a plan does "
                f"not support; remove it, or {OWN_LOOP}"
            )
        self._keep = kwargs.get("logits_to_keep")
        return (), {"input_ids": pack.microbatch.input_ids, "position_ids": pack.microbatch.position_ids}

    def _give_whole_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        pack = current_pairs()
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
