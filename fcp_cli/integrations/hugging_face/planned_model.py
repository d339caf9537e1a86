"""A transformers model in a script's own loop, whose loss on a micro-batch is this rank's part of the step's loss.

For loops that call `model(**batch).loss` themselves, with accelerate, DeepSpeed or Lightning modules.
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
    """A model trained by the script's own calls, hooked before it is wrapped by DDP etc.

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
