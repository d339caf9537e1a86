"""Numeric probe before the first step: compares attention on the plan's groups with attention without a ring.

A bypassed hook, a faulty kernel or a wrong rank order usually changes the loss too little to see in its curve. So the
probe compares one attention layer on random hidden states, forward and backward, token by token. Nothing else of the
model runs, to exclude dropout, expert routing that flips by rounding, and other pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.checks import attention_layers
from fcp_cli.integrations.megatron.data import (
    POSITIONS,
    TOKENS,
    LocalShard,
    PlannedMicroBatch,
    Samples,
    current_microbatch,
)
from fcp_cli.integrations.megatron.model import MegatronStack, device_of
from fcp_cli.plan.step import MicroBatch

# Largest relative L2 difference of a layer's output, or of its input gradient, explained by rounding.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_HIDDEN, _PLACES = "hidden", "places"


def probe(
    models: Sequence[Any],
    rows: Iterable[MicroBatch],
    enter: Callable[[LocalShard], PlannedMicroBatch],
    *,
    load: Callable[[MicroBatch, Samples], LocalShard],
    rank: int,
    multiple: int,
    stack: MegatronStack,
) -> float:
    """Run tiny sequences on the groups of these rows and on single ranks, and compare. Collective.

    Args:
        models: model chunks of this process; the first attention layer, if any, is run.
        rows: rows of this rank, in the plan's order.
        enter: returns the micro-batch of a shard, with its ring.
        load: loads the shard of a row.
        rank: rank of the plan.
        multiple: divisor of a shard's tokens.
        stack: stack of the model.

    Returns:
        Largest relative L2 difference of outputs and input gradients over all ranks.

    Raises:
        RunError: rounding does not explain the difference.
    """
    device = device_of(models)
    model = next((model for model in models if attention_layers(model)), None)
    if model is None:
        return _worst([0.0], device)
    layer = attention_layers(model)[0]
    weight = next(layer.parameters())
    tiny = [_tiny(row, multiple) for row in rows if not row.is_idle]
    lengths = {at: length for row in tiny for at, length in zip(row.sequences, row.lengths, strict=True)}
    made_up = _MadeUp(lengths, model.config.hidden_size, _axes(model))
    samples = Samples(dataset=made_up, collate=_collate, consumed=0)
    differences = [0.0]
    with _frozen(layer):
        for row in tiny:
            shard = load(row, samples)
            with stack.around_script():
                grouped = _attended(model, layer, shard.batch, weight, enter(shard))
            with stack.without_ring(model, layer):
                alone = []
                for at, length in zip(row.sequences, row.lengths, strict=True):
                    one = load(replace(row, ranks=(rank,), heads_degree=1, sequences=(at,), lengths=(length,)), samples)
                    alone.append(_attended(model, layer, one.batch, weight)[:, :length])
            places = shard.batch[_PLACES][0, shard.is_planned] - row.sequences[0]
            expected = torch.cat(alone, dim=1)[:, places]
            error, size = (t.flatten(1).norm(dim=1) for t in (grouped[:, shard.is_planned] - expected, expected))
            differences += (error / size.clamp_min(1e-30)).tolist()  # [output, input gradient]
    difference = _worst(differences, device)
    _require_rounding(difference, weight.dtype)
    return difference


def _require_rounding(difference: float, dtype: torch.dtype) -> None:
    tolerance = _TOLERANCES.get(dtype, 5e-2)
    if difference > tolerance:
        raise RunError(
            f"the probe before the first step failed: on the plan's groups attention differs by {difference:.1e} "
            f"(relative) from the same without a ring, and rounding explains {tolerance:.0e}; report it with "
            "the model and the output of fcp env"
        )


class _MadeUp:
    """Data set of random hidden states in place of embeddings, equal on all ranks.

    A sequence is indexed by the global place of its first token; `places` numbers its tokens from there.
    """

    def __init__(self, lengths: Mapping[int, int], hidden_size: int, axes: int) -> None:
        self._lengths = lengths
        self._hidden_size = hidden_size
        self._axes = axes

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        length = self._lengths[at]
        draw = torch.Generator().manual_seed(at)
        positions = torch.arange(length, device="cpu")
        return {
            TOKENS: torch.zeros_like(positions),
            POSITIONS: positions.expand(self._axes, -1) if self._axes > 1 else positions,
            _HIDDEN: torch.randn(self._hidden_size, length, generator=draw, device="cpu"),
            _PLACES: at + positions,
        }


def _tiny(row: MicroBatch, multiple: int) -> MicroBatch:
    """Return a row with two short sequences on the same ranks, of lengths that the degree does not divide."""
    lengths = (multiple * (2 * row.degree + 3), multiple * (row.degree + 1))
    # Distinct places for every row: the sequences are far shorter than 2^20 tokens.
    first = row.order << 20
    return replace(row, sequences=(first, first + lengths[0]), lengths=lengths)


def _axes(model: Any) -> int:
    return 3 if model.position_embedding_type == "mrope" else 1


def _collate(items: Any) -> dict[str, Tensor]:
    (item,) = items
    return {name: tensor.unsqueeze(0) for name, tensor in item.items()}


def _attended(
    model: Any, layer: Any, batch: Any, weight: Tensor, microbatch: PlannedMicroBatch | None = None
) -> Tensor:
    """Return [2, tokens, hidden_size] on the host: the layer's output, and the gradient of its input.

    Without a micro-batch, there is no ring, and Megatron's own rotary embedding applies.
    """
    tokens, positions = (batch[name].to(weight.device) for name in (TOKENS, POSITIONS))
    if positions.dim() == 3:  # [1, axes, tokens]; Megatron wants the axes first
        positions = positions.transpose(0, 1)
    hidden = batch[_HIDDEN].permute(2, 0, 1).to(weight.device, weight.dtype).contiguous()
    # Output gradient: distinct for each token, and equal with and without the ring.
    wanted = hidden.roll(1, dims=-1)
    hidden.requires_grad_()
    is_split = model.config.sequence_parallel
    token = current_microbatch.set(microbatch)
    try:
        with _only(layer, model.decoder) as outputs, suppress(_Attended):
            model(tokens, positions, None, scatter_to_sequence_parallel_region(hidden) if is_split else hidden)
    finally:
        current_microbatch.reset(token)
    (out,) = outputs
    if is_split:
        out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
    torch.autograd.backward((out * wanted).sum())
    assert hidden.grad is not None
    return torch.stack([out.detach(), hidden.grad]).squeeze(2).to("cpu", torch.float64)


class _Attended(Exception):
    """Raised to leave the model's forward after attention, before logits and multi-token prediction."""


@contextmanager
def _only(layer: Any, decoder: Any) -> Iterator[list[Tensor]]:
    """Replace the decoder's forward with this attention layer; yield a list that receives its output."""
    outputs: list[Tensor] = []

    def attend(
        hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Any, packed_seq_params: Any, **_: Any
    ) -> NoReturn:
        out, _bias = layer(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        outputs.append(out)
        raise _Attended

    decoder.set_input_tensor(None)  # a later stage may still hold the input of an evaluation, of another length
    own = vars(decoder).get("forward")
    decoder.forward = attend
    try:
        yield outputs
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own


@contextmanager
def _frozen(layer: nn.Module) -> Iterator[None]:
    """Freeze the layer's weights, so that backwards leave no gradients and do not trigger DDP's hooks."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


def _worst(differences: Iterable[float], device: torch.device) -> float:
    """Return the maximum over all processes, so that all fail or none; NaN counts as infinity."""
    found = torch.tensor([math.inf if math.isnan(one) else one for one in differences], device=device).max()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
