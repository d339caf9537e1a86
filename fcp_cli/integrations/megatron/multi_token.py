"""Multi-token prediction (MTP) under a plan: layers and losses look ahead within sequences instead of shards.

Per layer, Megatron shifts token ids, positions, labels and the loss mask by one token over a static group, with
`roll_tensor`. Under a plan, the following tokens come from the whole sequences, which the rank has read. How far a
tensor has been shifted follows from its identity: it is an argument of the model, or the result of an earlier shift.

Newer versions weigh each layer's loss by (tokens with a loss) / (tokens with a loss that many places ahead). Under a
plan, both are counted per sequence, so the weight does not depend on how sequences are sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Signatures
from fcp_cli.integrations.megatron.checks import attention_layers
from fcp_cli.integrations.megatron.data import (
    LABELS,
    LOSS_MASK,
    POSITIONS,
    TOKENS,
    Ahead,
    PlannedMicroBatch,
    current_microbatch,
)

_PARAMS = "packed_seq_params"
_ROLL = "roll_tensor"
_ARGUMENTS = {TOKENS: "input_ids", POSITIONS: "position_ids", LABELS: "labels", LOSS_MASK: "loss_mask"}


HOOKED: Final[Mapping[str, Signatures]] = {
    multi_token_prediction.__name__: {
        _ROLL: ("tensor", _PARAMS),
        "MultiTokenPredictionLayer.forward": ("input_ids", "position_ids", _PARAMS),
    },
    gpt_model.__name__: {"GPTModel.forward": tuple(_ARGUMENTS.values())},
}
"""Functions of multi-token prediction that are hooked, by module."""


def hook_multi_token(model: Any) -> int:
    """Hook a model's multi-token prediction to follow the micro-batch of each call; call it before `hook_model`.

    Returns:
        Number of attention calls per forward in addition to one per layer, from repeated layers.
    """
    for module in (multi_token_prediction, gpt_model):
        _hook_roll(module)
    weigh = getattr(multi_token_prediction, "process_mtp_loss", None)
    is_weighted = weigh is not None and "original_num_tokens" in weigh.__code__.co_varnames
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    model.forward = _Forward(model, names, is_weighted)
    block = getattr(model, "mtp", None)
    if block is None:
        return 0
    for layer in block.layers:
        # Older versions pass the sequences through the checkpoint function, which takes only tensors.
        if "forward_func" in inspect.signature(layer._checkpointed_forward).parameters:
            layer._checkpointed_forward = partial(_checkpointed, layer._checkpointed_forward)
    repeats = model.config.mtp_num_layers // len(block.layers) - 1
    return repeats * len(attention_layers(block)) if repeats else 0


class TokensAhead:
    """Replacement of `roll_tensor` for one call of the model.

    Args:
        ahead: following tokens, on the model's device.
        given: argument tensors of the call, by name; Megatron shifts a copy of the labels.
        is_weighted: whether this version of Megatron weighs the loss.
    """

    def __init__(self, ahead: Ahead, given: Mapping[str, Tensor], *, is_weighted: bool) -> None:
        self._ahead = ahead
        self._is_weighted = is_weighted
        self._known = [(tensor, name, 0) for name, tensor in given.items() if name != LABELS]
        self._copies = [LABELS] if LABELS in given else []

    def after(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tensor shifted by one more token, and the number of tokens with a loss, like `roll_tensor`."""
        name, places = self._identify(tensor)
        values = self._ahead.values[name][places]
        if name == LOSS_MASK and self._is_weighted:
            values = values * self._ahead.ratio[places] / self._base
        moved = values.reshape(tensor.shape).to(tensor.dtype)
        self._known.append((moved, name, places + 1))
        count = 1.0 if self._is_weighted else self._ahead.counts[places + 1] or 1.0
        return moved, torch.full((), count, dtype=torch.float32, device=tensor.device)

    def weights(self, mask: Tensor) -> Tensor:
        """Return the mask to pass as loss mask to a Megatron that weighs the loss, where only its sum matters.

        Megatron multiplies the loss by (sum of the loss mask) / (count returned with the shifted mask), and logs the
        loss sum over that count. With a sum of `_base` and a count of 1, a sequence's loss is logged as its mean, once
        for all members of its group.
        """
        weights = torch.zeros_like(mask)
        weights[..., 0] = self._base
        self._known.append((weights, LOSS_MASK, 0))
        return weights

    @property
    def _base(self) -> float:
        """Mean number of tokens with a loss per sequence of the row; 1 if there are none."""
        return self._ahead.counts[0] or 1.0

    def _identify(self, tensor: Tensor) -> tuple[str, int]:
        found = next(((name, places) for known, name, places in self._known if known is tensor), None)
        if found is None:
            if not self._copies:
                raise RunError(
                    "multi-token prediction (MTP) moves a tensor that is neither tokens, positions, labels nor the "
                    "loss mask of the call; this model, or version of megatron-core, cannot follow a plan with it"
                )
            found = self._copies.pop(), 0
        return found


class _Forward:
    """Forward of a model with multi-token prediction, which attaches `TokensAhead` to the call's sequences.

    The first call with tokens compares the script's arguments with the batch, which synchronizes with the device.
    """

    def __init__(self, model: Any, names: list[str], is_weighted: bool) -> None:
        self._original = model.forward
        self._makes_loss = model.post_process
        self._names = names
        self._is_weighted = is_weighted
        self._is_compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = current_microbatch.get()
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        given = {name: arguments.get(argument) for name, argument in _ARGUMENTS.items()}
        if microbatch is None or microbatch.ahead is None or given[TOKENS] is None:
            return self._original(*args, **kwargs)
        known = {name: tensor for name, tensor in given.items() if tensor is not None}
        ahead = TokensAhead(microbatch.ahead, known, is_weighted=self._is_weighted)
        arguments[_PARAMS].ahead = ahead
        if self._makes_loss:
            self._compare(given, microbatch)
            if self._is_weighted:
                arguments["loss_mask"] = ahead.weights(known[LOSS_MASK])
        return self._original(**arguments)

    def _compare(self, given: Mapping[str, Tensor | None], microbatch: PlannedMicroBatch) -> None:
        """Raise RunError unless labels and loss mask equal the batch's, from which following tokens are taken."""
        for name in (LABELS, LOSS_MASK):
            tensor, planned = given[name], microbatch.batch.get(name)
            if tensor is None or planned is None:
                lacking = "the data set's items have" if planned is None else "the script gives the model"
                raise RunError(f"multi-token prediction (MTP) needs {name}, which pretrain_gpt.py has; {lacking} none")
            if not self._is_compared and not torch.equal(tensor.cpu(), planned.to(tensor.dtype).cpu()):
                raise RunError(
                    f"the script gives the model other {name} than its data iterator gave; under a plan multi-token "
                    "prediction (MTP) takes the next tokens from the data set, so pass them on unchanged"
                )
        self._is_compared = self._is_compared or bool(microbatch.lengths)


def _hook_roll(module: ModuleType) -> None:
    """Hook `roll_tensor` in a module that defines it, or (older versions) imports it by name."""
    # `wraps` sets __wrapped__, so that a second model does not hook it twice.
    original: Callable[..., tuple[Tensor, Tensor]] | None = getattr(module, _ROLL, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ahead = getattr(kwargs.get(_PARAMS), "ahead", None)
        return original(tensor, *args, **kwargs) if ahead is None else ahead.after(tensor)

    setattr(module, _ROLL, moved)


def _checkpointed(
    original: Callable[..., Any], forward_func: Callable[..., Any], *, packed_seq_params: Any, **kwargs: Any
) -> Any:
    """Pass sequences to the recomputed function by closure, since the checkpoint saves tensor arguments only."""
    names = list(kwargs)

    def forward(*values: Any, **named: Any) -> Any:
        return forward_func(**dict(zip(names, values, strict=False)), **named, packed_seq_params=packed_seq_params)

    return original(forward, **kwargs)
