"""A model of transformers in a script's own loop: on a micro-batch of the plan its loss is this rank's share.

For loops that call `model(**batch).loss` themselves, around accelerate and in Lightning's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fcp_cli.cost.recompute_levels import RecomputeLevel
from fcp_cli.integrations.hugging_face.follow import base_model
from fcp_cli.integrations.transformers.loss import prepare_loss
from fcp_cli.integrations.transformers.preparation import SwitchedAttention, recompute_layers
from fcp_cli.runtime.session.microbatch import LocalMicroBatch


class PlannedModel:
    """A model that is trained by a script's own calls, hooked before DDP and others wrap it.

    Args:
        model: the model of transformers, also inside adapters.

    Attributes:
        model: the model, as given.
        current: the micro-batch that is out; None between.
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
        """Return a micro-batch as a script's loader would give it; the model runs on its ring until `leave`.

        Args:
            microbatch: its micro-batch in the plan.
            divided_by: divisor of the loss in the script's framework, for gradient accumulation; undone here.
            shown: loss that the script sees, as a factor on this rank's share of the step's loss.
        """
        self.current, self._divided_by, self._shown = microbatch, divided_by, shown
        self._on_rings.enter_context(self._attention.on_rings())
        return _PlannedBatch(
            input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, labels=microbatch.labels
        )

    def leave(self) -> None:
        """Give the model its own attention and loss."""
        self.current = None
        self._on_rings.close()

    def recompute_by(self, levels: Sequence[RecomputeLevel]) -> None:
        """Recompute layers as needed if the plan has levels, overriding the script's checkpointing."""
        if levels:
            recompute_layers(base_model(self.model), "as-needed", levels)

    def release(self) -> None:
        """Take the hooks away, for another run of the same model."""
        self.leave()
        for hook in self._hooks:
            hook.remove()

    def _complete_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        microbatch = self.current
        given = args[0] if args else kwargs.get("input_ids")
        if microbatch is None or given is not microbatch.input_ids or len(args) > 2:  # tokens and mask may have no name
            return None
        return args[:1], {**kwargs, "position_ids": microbatch.position_ids, "attention_mask": None}

    def _share_loss(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put this rank's share of the step's loss where the script takes it, with the value that is to be shown."""
        microbatch = self.current
        if microbatch is None or getattr(output, "loss", None) is None:
            return None
        share = microbatch.normalised(output.loss)
        trained, shown = share * self._divided_by, share.detach() * (self._shown / microbatch.loss_factor)
        return replace(output, loss=trained + (shown - trained.detach()))


class _PlannedBatch(dict[str, Tensor]):
    """A micro-batch; it has no attention mask, since the plan defines attention."""

    def __missing__(self, name: str) -> None:
        if name != "attention_mask":
            raise KeyError(name)
